package httpboot

import (
	"errors"
	"io"
)

// padded is a file with zeros after its end. The kernel joins initrds byte to
// byte and finds an archive after another only at a multiple of four.
type padded struct {
	file        io.ReadSeeker
	size, total int64
	at          int64
	sought      bool // whether file stands at at
}

func pad(f io.ReadSeeker, size int64, to int64) *padded {
	return &padded{file: f, size: size, total: (size + to - 1) / to * to}
}

func (p *padded) Read(b []byte) (int, error) {
	switch {
	case p.at >= p.total:
		return 0, io.EOF
	case p.at >= p.size:
		n := int(min(int64(len(b)), p.total-p.at))
		clear(b[:n])
		p.at += int64(n)
		return n, nil
	}
	if !p.sought {
		if _, err := p.file.Seek(p.at, io.SeekStart); err != nil {
			return 0, err
		}
		p.sought = true
	}
	n, err := p.file.Read(b[:min(int64(len(b)), p.size-p.at)])
	p.at += int64(n)
	if err == io.EOF {
		err = nil
		if n == 0 {
			err = io.ErrUnexpectedEOF // shorter than it said
		}
	}
	return n, err
}

func (p *padded) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += p.at
	case io.SeekEnd:
		offset += p.total
	}
	if offset < 0 {
		return 0, errors.New("seek before the start")
	}
	p.at, p.sought = offset, false
	return offset, nil
}
