package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/artifact"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// httpSuite measures a disc image as machines fetch it: whole, and block by block
// as iPXE reads a drive.
var httpSuite = suite{
	names: []string{"http.get.1", "http.get.16", "http.range.1", "http.range.16",
		"http.get.1.fileserver", "http.get.16.fileserver", "http.range.1.fileserver", "http.range.16.fileserver"},
	run: measureHTTP,
}

const (
	// httpServer and a name make this program that server of httpFolder, and
	// httpLoad the client of the URL's server.
	httpServer = "http-"
	httpFolder = "BENCH_HTTP_FOLDER"
	httpLoad   = "load-http"
	httpURL    = "BENCH_HTTP_URL"
	httpConns  = "BENCH_HTTP_CONNECTIONS"
	httpBlock  = "BENCH_HTTP_BLOCK"

	httpDisc = "disc.iso"
	httpMAC  = "52:54:00:00:00:01"
	httpSize = 256 << 20
	// httpRead is what iPXE reads of a disc at a time.
	httpRead = 2048
	httpFor  = 3 * time.Second
)

var httpAt = netip.MustParseAddrPort("127.0.80.1:8080")

// httpCases are the rows. Of block 0 the whole disc is fetched.
var httpCases = []struct {
	name         string
	conns, block int
}{{"http.get.1", 1, 0}, {"http.get.16", 16, 0}, {"http.range.1", 1, httpRead}, {"http.range.16", 16, httpRead}}

// measureHTTP has one client ask one server at a time, each on a core of its own.
func measureHTTP(ctx context.Context, s settings) ([]row, error) {
	serverCore, clientCore, err := tftpCores()
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(s.log, "bench: http: servers on core %d, the client on core %d\n", serverCore, clientCore)
	dir, err := os.MkdirTemp(s.memory, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	// The peer's worker reads it under a user of its own.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	disc := make([]byte, httpSize)
	rand.NewChaCha8([32]byte{1}).Read(disc)
	if err := os.WriteFile(filepath.Join(dir, httpDisc), disc, 0o644); err != nil {
		return nil, err
	}
	servers := []string{"ours", "fileserver"}
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		fmt.Fprintln(s.log, "bench: http: nginx and its rows are left out:", err)
	} else {
		servers = append(servers, "nginx")
	}
	speeds := map[string][]float64{}
	for i := range s.rounds {
		for _, server := range servers {
			pid, stop, err := serveHTTP(ctx, serverCore, server, nginx, dir)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", server, err)
			}
			for _, c := range httpCases {
				before, err := processorSeconds(pid)
				if err != nil {
					return nil, errors.Join(err, stop())
				}
				speed, err := loadHTTP(ctx, clientCore, server, c.conns, c.block)
				if err != nil {
					return nil, errors.Join(fmt.Errorf("%s of %s: %w", c.name, server, err), stop())
				}
				after, err := processorSeconds(pid)
				if err != nil {
					return nil, errors.Join(err, stop())
				}
				// On a busy machine the second figure says more.
				fmt.Fprintf(s.log, "bench: %s of %s, round %d of %d: %.0f a second, %.0f a second of the server's processor time\n",
					c.name, server, i+1, s.rounds, speed, speed*httpFor.Seconds()/(after-before))
				speeds[server+c.name] = append(speeds[server+c.name], speed)
			}
			if err := stop(); err != nil {
				return nil, fmt.Errorf("%s: %w", server, err)
			}
		}
	}
	var rows []row
	for _, c := range httpCases {
		unit, what := "MB/s", "of one file"
		if c.block > 0 {
			unit, what = "1/s", fmt.Sprintf("of blocks of %d bytes", c.block)
		}
		ours := median(speeds["ours"+c.name])
		if nginx != "" {
			rows = append(rows, row{name: c.name, ours: ours, unit: unit, theirs: median(speeds["nginx"+c.name]), goal: 0.9,
				peer: fmt.Sprintf("nginx with sendfile, one worker, %s, %d connections", what, c.conns)})
		}
		rows = append(rows, row{name: c.name + ".fileserver", ours: ours, unit: unit, theirs: median(speeds["fileserver"+c.name]),
			peer: fmt.Sprintf("Go's own http.FileServer, %s, %d connections", what, c.conns)})
	}
	return rows, nil
}

const nginxConf = `daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events { worker_connections 128; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	keepalive_requests 1000000000;
	default_type application/octet-stream;
	client_body_temp_path .;
	proxy_temp_path .;
	fastcgi_temp_path .;
	uwsgi_temp_path .;
	scgi_temp_path .;
	server {
		listen %s;
		root %s;
	}
}
`

// serveHTTP starts a server on a core and waits until it answers.
func serveHTTP(ctx context.Context, core int, name, nginx, dir string) (pid int, stop func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	var said bytes.Buffer
	var cmd *exec.Cmd
	if name == "nginx" {
		conf := filepath.Join(dir, "nginx.conf")
		if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConf, httpAt, dir), 0o644); err != nil {
			return 0, nil, err
		}
		cmd = exec.CommandContext(ctx, nginx, "-p", dir, "-c", conf, "-e", "stderr")
	} else {
		self, err := os.Executable()
		if err != nil {
			return 0, nil, err
		}
		cmd = exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), hostVariable+"="+httpServer+name, httpFolder+"="+dir)
	}
	cmd.Stderr = &said
	if err := startOn(core, cmd); err != nil {
		return 0, nil, err
	}
	stop = func() error {
		cancel()
		_ = cmd.Wait() // killed
		return nil
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp4", httpAt.String()); err == nil {
			conn.Close()
			return cmd.Process.Pid, stop, nil
		}
	}
	return 0, nil, errors.Join(fmt.Errorf("it does not take its port: %s", said.String()), stop())
}

// processorSeconds is what a process has used so far.
func processorSeconds(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("process %d: %q", pid, text)
	}
	user, err := strconv.ParseFloat(fields[11], 64)
	system, err2 := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100, errors.Join(err, err2) // USER_HZ
}

// loadHTTP is what one server gives, in MB or answers a second.
func loadHTTP(ctx context.Context, core int, server string, conns, block int) (float64, error) {
	at := "http://" + httpAt.String()
	url := at + "/" + httpDisc
	if server == "ours" {
		var err error
		if url, err = discURL(httpboot.ScriptURL(at, httpMAC)); err != nil {
			return 0, err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), hostVariable+"="+httpLoad, httpURL+"="+url, httpConns+"="+strconv.Itoa(conns), httpBlock+"="+strconv.Itoa(block))
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := startOn(core, cmd); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
}

// discURL is the drive's in a script of ours.
func discURL(script string) (string, error) {
	resp, err := http.Get(script)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	for word := range strings.FieldsSeq(string(text)) {
		if strings.HasSuffix(word, "/"+httpDisc) {
			return word, nil
		}
	}
	return "", fmt.Errorf("GET %s = %s, without a drive:\n%s", script, resp.Status, text)
}

// beHTTPServer serves the folder's disc with ours or with Go's file server.
func beHTTPServer(ctx context.Context, name string) error {
	dir := os.Getenv(httpFolder)
	if name == "fileserver" {
		server := &http.Server{Addr: httpAt.String(), Handler: http.FileServer(http.Dir(dir))}
		return server.ListenAndServe()
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	from, err := newDiscSource(filepath.Join(dir, httpDisc))
	if err != nil {
		return err
	}
	cache, err := artifact.Open(filepath.Join(dir, "cache"), 2*httpSize, from, log)
	if err != nil {
		return err
	}
	defer cache.Close()
	r, err := cache.Open(ctx, from.sum)
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	if err := r.Close(); err != nil {
		return err
	}
	counts, err := boots.Open(filepath.Join(dir, "boots"), func(string) (string, bool) { return "", false })
	if err != nil {
		return err
	}
	m := &pxev1.Machine{MachineId: "bench", Macs: []string{httpMAC}, Action: pxev1.Action_ACTION_ISO, Purpose: "iso", MaxBoots: 1 << 20,
		WindowId: "w", WindowUntilMs: time.Now().Add(time.Hour).UnixMilli(), Iso: &pxev1.Iso{Sha256: from.sum, Size: httpSize, Name: httpDisc}}
	h := httpboot.New(httpboot.Config{
		Holder: func(netip.Addr) (string, bool) { return httpMAC, true },
		Request: func(mac string) decide.Request {
			r := decide.Request{Machine: m, MAC: mac, Now: time.Now(), Client: decide.Client{Arch: decide.X64}}
			r.Boots, r.Done = counts.Of(m.MachineId, m.WindowId)
			return r
		},
		Counts: counts, Files: files.Dir(dir),
		Artifacts: func(ctx context.Context, digest string) (io.ReadSeekCloser, int64, error) {
			r, err := cache.Open(ctx, digest)
			if err != nil {
				return nil, 0, err
			}
			return r, r.Size(), nil
		},
		Stage: func(string, *pxev1.Machine, string, string) {}, Now: time.Now, Log: log,
	})
	ln, err := net.Listen("tcp4", httpAt.String())
	if err != nil {
		return err
	}
	return httpboot.Serve(ctx, ln, h, log)
}

// discSource is a gateway with one artifact.
type discSource struct {
	path, sum string
	list      []byte
}

const discChunk = 4 << 20

func newDiscSource(path string) (*discSource, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	whole := sha256.Sum256(content)
	s := &discSource{path: path, sum: hex.EncodeToString(whole[:])}
	for len(content) > 0 {
		n := min(len(content), discChunk)
		sum := sha256.Sum256(content[:n])
		s.list, content = append(s.list, sum[:]...), content[n:]
	}
	return s, nil
}

func (s *discSource) Locate(context.Context, string) (*agentv1.LocateResponse, error) {
	sum := sha256.Sum256(s.list)
	return &agentv1.LocateResponse{Sha256: s.sum, SizeBytes: httpSize, ChunkSizeBytes: discChunk, ChunksSha256: hex.EncodeToString(sum[:]), Urls: []string{"/disc"}}, nil
}

func (s *discSource) Fetch(_ context.Context, url string, offset int64) (io.ReadCloser, error) {
	if strings.HasSuffix(url, "/chunks") {
		return io.NopCloser(bytes.NewReader(s.list)), nil
	}
	f, err := os.Open(s.path)
	if err != nil {
		return nil, err
	}
	_, err = f.Seek(offset, io.SeekStart)
	return f, err
}

// beHTTPLoad asks as fast as it is answered for a while, and prints what it got.
func beHTTPLoad(out io.Writer) error {
	conns, err := strconv.Atoi(os.Getenv(httpConns))
	if err != nil {
		return err
	}
	block, err := strconv.Atoi(os.Getenv(httpBlock))
	if err != nil {
		return err
	}
	host, path, _ := strings.Cut(strings.TrimPrefix(os.Getenv(httpURL), "http://"), "/")
	end := time.Now().Add(httpFor)
	type result struct {
		answers, bytes int64
		err            error
	}
	results := make(chan result, conns)
	began := time.Now()
	for i := range conns {
		go func() {
			var r result
			r.answers, r.bytes, r.err = ask(host, path, block, uint64(i), end)
			results <- r
		}()
	}
	var sum result
	for range conns {
		r := <-results
		sum.answers, sum.bytes, sum.err = sum.answers+r.answers, sum.bytes+r.bytes, errors.Join(sum.err, r.err)
	}
	if sum.err != nil {
		return sum.err
	}
	took := time.Since(began).Seconds()
	if block > 0 {
		_, err = fmt.Fprintln(out, float64(sum.answers)/took)
	} else {
		_, err = fmt.Fprintln(out, float64(sum.bytes)/1e6/took)
	}
	return err
}

// ask is one connection, kept alive: request after request, with whatever of the
// last body comes before the end.
func ask(host, path string, block int, seed uint64, end time.Time) (answers, received int64, err error) {
	conn, err := net.Dial("tcp4", host)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(end.Add(10 * time.Second)); err != nil {
		return 0, 0, err
	}
	from := bufio.NewReaderSize(conn, 64<<10)
	random := rand.New(rand.NewPCG(seed, 0))
	body := make([]byte, 256<<10)
	request := make([]byte, 0, 512)
	for time.Now().Before(end) {
		request = append(append(append(request[:0], "GET /"...), path...), " HTTP/1.1\r\nHost: "...)
		request = append(append(request, host...), "\r\nConnection: keep-alive\r\nUser-Agent: iPXE/1.21.1\r\n"...)
		want, status := int64(httpSize), " 200 "
		if block > 0 {
			at := random.Int64N(int64(httpSize/block)) * int64(block)
			request = strconv.AppendInt(append(request, "Range: bytes="...), at, 10)
			request = append(strconv.AppendInt(append(request, '-'), at+int64(block)-1, 10), "\r\n"...)
			want, status = int64(block), " 206 "
		}
		if _, err := conn.Write(append(request, "\r\n"...)); err != nil {
			return 0, 0, err
		}
		length := int64(-1)
		for first := true; ; first = false {
			line, err := from.ReadSlice('\n')
			if err != nil {
				return 0, 0, err
			}
			if len(line) <= 2 {
				break
			}
			if first && !bytes.Contains(line, []byte(status)) {
				return 0, 0, fmt.Errorf("GET /%s: %s", path, line)
			}
			if n, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
				if length, err = strconv.ParseInt(string(bytes.TrimSpace(n)), 10, 64); err != nil {
					return 0, 0, err
				}
			}
		}
		if length != want {
			return 0, 0, fmt.Errorf("GET /%s: a body of %d bytes, want %d", path, length, want)
		}
		for left := length; left > 0; {
			n, err := from.Read(body[:min(left, int64(len(body)))])
			if err != nil {
				return 0, 0, err
			}
			left, received = left-int64(n), received+int64(n)
			if block == 0 && time.Now().After(end) {
				return answers, received, nil
			}
		}
		answers++
	}
	return answers, received, nil
}
