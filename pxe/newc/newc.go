// Package newc makes the cpio archive with one file that is appended to a machine's initrd.
package newc

import (
	"bytes"
	"fmt"
	"strings"
)

// BootArchive is a newc archive that holds content as a file of mode 0600 at
// path, under folders of mode 0755, padded to 512 bytes. The kernel unpacks it
// over what an earlier initrd left.
func BootArchive(path string, content []byte) []byte {
	var b bytes.Buffer
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i := 1; i < len(parts); i++ {
		entry(&b, i, 0o040755, 2, strings.Join(parts[:i], "/"), nil)
	}
	entry(&b, len(parts), 0o100600, 1, strings.Join(parts, "/"), content)
	entry(&b, 0, 0, 1, "TRAILER!!!", nil)
	pad(&b, 512)
	return b.Bytes()
}

func entry(b *bytes.Buffer, inode, mode, links int, name string, content []byte) {
	fmt.Fprintf(b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	b.WriteString(name)
	b.WriteByte(0)
	pad(b, 4)
	b.Write(content)
	pad(b, 4)
}

func pad(b *bytes.Buffer, to int) {
	for b.Len()%to != 0 {
		b.WriteByte(0)
	}
}
