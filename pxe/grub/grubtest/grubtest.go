// Package grubtest runs GRUB's configurations as GRUB does, as far as ours use its language.
//
// The rules of quoting, of words that are keywords only where a command begins, of
// what a kernel is told, and of commands that fail without ending anything are those
// of grub-core/script/yylex.l and parser.y, lib/cmdline.c and normal/main.c of GRUB
// 2.06. What GRUB knows and this does not is an error, so that no configuration of
// ours uses what was not looked up.
package grubtest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Machine is a GRUB that runs. Fetch is given a device with its parentheses and a path.
type Machine struct {
	CPU string // what $grub_cpu says: "x86_64" or "arm64"
	// HTTP: the image has the module. Without it, GRUB asks for it, and then has no such device.
	HTTP  bool
	Fetch func(device, path string) ([]byte, error)
	// Boots says whether what is loaded starts; nil: always.
	Boots func(End) bool
	// Disk is the device on which search finds a file; empty: none does.
	Disk string

	kernels int
	vars    map[string]string
	loaded  End
	end     End
}

// End is how it ended, and what happened until then.
type End struct {
	// How is "linux", "chainloader", "exit", "reboot", "nothing", into which GRUB starts
	// a second kernel, or "prompt", where it waits for a person for ever.
	How string
	// Cmdline is the kernel's whole command line, and Initrds what it finds in memory, in order.
	Cmdline string
	Kernel  []byte
	Initrds [][]byte
	// From is where the kernel or program came from.
	From string
	Said []string
	// Slept are the seconds of each pause.
	Slept []int
	// Fetched are the device and path of each file that was opened.
	Fetched []string
}

// ended stops a run.
type ended struct{}

func (ended) Error() string { return "ended" }

// Run runs a configuration as the network image does that has fetched it.
func (m *Machine) Run(text string) (End, error) {
	m.vars = map[string]string{"grub_cpu": m.CPU, "?": "0"}
	m.loaded, m.end, m.kernels = End{}, End{}, 0
	err := m.source(text)
	if errors.As(err, &ended{}) {
		return m.end, nil
	}
	if err != nil {
		return m.end, err
	}
	m.end.How = "prompt"
	return m.end, nil
}

func (m *Machine) source(text string) error {
	tokens, err := lex(text)
	if err != nil {
		return err
	}
	p := &parser{tokens: tokens}
	list, err := p.list()
	if err == nil && p.at < len(p.tokens) {
		err = fmt.Errorf("grub: unexpected %q", p.tokens[p.at].text)
	}
	if err != nil {
		return err
	}
	_, err = m.run(list)
	return err
}

// token is a word with its pieces, or a separator.
type token struct {
	text   string
	sep    bool
	pieces []piece
}

type piece struct {
	text     string
	variable bool
	quoted   bool
}

func (t token) is(keyword string) bool {
	return !t.sep && len(t.pieces) == 1 && !t.pieces[0].quoted && !t.pieces[0].variable && t.text == keyword
}

func name(s string) int {
	n := 0
	for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' || n > 0 && s[n] >= '0' && s[n] <= '9') {
		n++
	}
	return n
}

func lex(s string) ([]token, error) {
	var out []token
	var word []piece
	begun := 0
	flush := func(i int) {
		if word != nil {
			out = append(out, token{text: s[begun:i], pieces: word})
		}
		word = nil
	}
	add := func(i int, p piece) {
		if word == nil {
			begun = i
		}
		word = append(word, p)
	}
	variable := func(i int, quoted bool) (int, error) {
		n := name(s[i+1:])
		if n == 0 {
			return 0, fmt.Errorf("grub: a $ without a name in %.60q", s[i:])
		}
		add(i, piece{text: s[i+1 : i+1+n], variable: true, quoted: quoted})
		return i + 1 + n, nil
	}
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c == ' ' || c == '\t':
			flush(i)
			i++
		case c == '\n' || c == ';':
			flush(i)
			out = append(out, token{text: string(c), sep: true})
			i++
		case c == '#' && word == nil:
			for i < len(s) && s[i] != '\n' {
				i++
			}
		case c == '\'':
			n := strings.IndexByte(s[i+1:], '\'')
			if n < 0 {
				return nil, fmt.Errorf("grub: an open quote in %.60q", s[i:])
			}
			add(i, piece{text: s[i+1 : i+1+n], quoted: true})
			i += n + 2
		case c == '"':
			add(i, piece{quoted: true})
			i++
			for i < len(s) && s[i] != '"' {
				if s[i] == '$' {
					var err error
					if i, err = variable(i, true); err != nil {
						return nil, err
					}
					continue
				}
				if s[i] == '\\' {
					return nil, errors.New("grub: a backslash in quotes")
				}
				n := strings.IndexAny(s[i:], "\"$\\")
				if n < 0 {
					n = len(s) - i
				}
				add(i, piece{text: s[i : i+n], quoted: true})
				i += n
			}
			if i == len(s) {
				return nil, errors.New("grub: an open double quote")
			}
			i++
		case c == '$':
			var err error
			if i, err = variable(i, false); err != nil {
				return nil, err
			}
		case strings.IndexByte("{}|&<>\\", c) >= 0:
			return nil, fmt.Errorf("grub: %q outside of quotes in %.60q", c, s[i:])
		default:
			n := strings.IndexAny(s[i:], "{}|&$;<> \t\n'\"\\")
			if n < 0 {
				n = len(s) - i
			}
			add(i, piece{text: s[i : i+n]})
			i += n
		}
	}
	flush(len(s))
	return out, nil
}

// command is a simple command, an if, or a for.
type command struct {
	words []token
	// An if has conditions and as many branches, or one more: its else.
	conditions, branches [][]command
	// A for has a variable, its words are what it goes through, and one branch is its body.
	variable string
}

type parser struct {
	tokens []token
	at     int
}

func (p *parser) peek(keywords ...string) bool {
	return p.at < len(p.tokens) && slices.ContainsFunc(keywords, p.tokens[p.at].is)
}

func (p *parser) expect(keyword string) error {
	if !p.peek(keyword) {
		return fmt.Errorf("grub: want %q at %v", keyword, p.tokens[min(p.at, len(p.tokens)):])
	}
	p.at++
	return nil
}

func (p *parser) list() ([]command, error) {
	var out []command
	for p.at < len(p.tokens) {
		switch {
		case p.tokens[p.at].sep:
			p.at++
		case p.peek("then", "elif", "else", "fi", "do", "done"):
			return out, nil
		case p.peek("if"):
			c, err := p.conditional()
			if err != nil {
				return nil, err
			}
			out = append(out, c)
		case p.peek("for"):
			c, err := p.loop()
			if err != nil {
				return nil, err
			}
			out = append(out, c)
		case p.peek("while", "until", "function", "case", "select", "[[", "!"):
			return nil, fmt.Errorf("grub: %q is not one of those that ours use", p.tokens[p.at].text)
		default:
			c := command{words: p.words()}
			out = append(out, c)
		}
	}
	return out, nil
}

func (p *parser) words() []token {
	begun := p.at
	for p.at < len(p.tokens) && !p.tokens[p.at].sep {
		p.at++
	}
	return p.tokens[begun:p.at]
}

func (p *parser) conditional() (c command, err error) {
	for p.peek("if", "elif") {
		p.at++
		condition, err := p.list()
		if err == nil {
			err = p.expect("then")
		}
		if err != nil {
			return c, err
		}
		branch, err := p.list()
		if err != nil {
			return c, err
		}
		c.conditions, c.branches = append(c.conditions, condition), append(c.branches, branch)
	}
	if p.peek("else") {
		p.at++
		branch, err := p.list()
		if err != nil {
			return c, err
		}
		c.branches = append(c.branches, branch)
	}
	for _, b := range append(slices.Clone(c.conditions), c.branches...) {
		if len(b) == 0 {
			return c, errors.New("grub: an empty part of an if")
		}
	}
	return c, p.expect("fi")
}

func (p *parser) loop() (c command, err error) {
	p.at++
	if p.at == len(p.tokens) || name(p.tokens[p.at].text) != len(p.tokens[p.at].text) {
		return c, errors.New("grub: a for without a variable")
	}
	c.variable = p.tokens[p.at].text
	p.at++
	if err := p.expect("in"); err != nil {
		return c, err
	}
	c.words = p.words()
	for p.at < len(p.tokens) && p.tokens[p.at].sep {
		p.at++
	}
	if err := p.expect("do"); err != nil {
		return c, err
	}
	body, err := p.list()
	if err != nil {
		return c, err
	}
	c.branches = [][]command{body}
	return c, p.expect("done")
}

func (m *Machine) expand(words []token) []string {
	var out []string
	for _, w := range words {
		text, some := "", false
		for _, p := range w.pieces {
			switch {
			case !p.variable:
				text, some = text+p.text, true
			case p.quoted:
				text, some = text+m.vars[p.text], true
			case m.vars[p.text] != "":
				text, some = text+m.vars[p.text], true
			}
		}
		if some {
			out = append(out, text)
		}
	}
	return out
}

// run is true where the last command succeeded. The error is the end, or of the language.
func (m *Machine) run(list []command) (ok bool, err error) {
	ok = true
	for _, c := range list {
		switch {
		case c.conditions != nil:
			ok, err = m.runIf(c)
		case c.variable != "":
			for _, value := range m.expand(c.words) {
				m.vars[c.variable] = value
				if ok, err = m.run(c.branches[0]); err != nil {
					break
				}
			}
		default:
			ok, err = m.do(m.expand(c.words))
		}
		if err != nil {
			return false, err
		}
	}
	return ok, nil
}

func (m *Machine) runIf(c command) (bool, error) {
	for i, condition := range c.conditions {
		ok, err := m.run(condition)
		if err != nil {
			return false, err
		}
		if ok {
			return m.run(c.branches[i])
		}
	}
	if len(c.branches) > len(c.conditions) {
		return m.run(c.branches[len(c.conditions)])
	}
	return true, nil
}

// do runs one command. A failure is told and is no end.
func (m *Machine) do(argv []string) (bool, error) {
	if len(argv) == 0 {
		return true, nil
	}
	run := m.command(argv[0])
	if run == nil {
		return false, fmt.Errorf("grub: %q is not one of those that ours use", argv[0])
	}
	err := run(argv[1:])
	if errors.As(err, &ended{}) || errors.Is(err, errLanguage) {
		return false, err
	}
	if err != nil {
		m.end.Said = append(m.end.Said, "error: "+err.Error())
	}
	return err == nil, nil
}

var errLanguage = errors.New("grub")

func language(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errLanguage, fmt.Sprintf(format, args...))
}

// command is one of GRUB's, by name; nil: none that ours use.
func (m *Machine) command(name string) func([]string) error {
	return map[string]func([]string) error{
		"[": m.test, "boot": m.boot, "chainloader": m.chainloader, "echo": m.echo, "exit": m.exit, "initrd": m.initrd,
		"linux": m.linux, "reboot": m.reboot, "search": m.search, "set": m.set, "sleep": m.sleep, "source": m.sourceFile,
	}[name]
}

var errFalse = errors.New("false")

func (*Machine) test(args []string) error {
	if len(args) == 0 || args[len(args)-1] != "]" {
		return language("[ without ]")
	}
	args = args[:len(args)-1]
	holds := false
	switch {
	case len(args) == 2 && args[0] == "-z":
		holds = args[1] == ""
	case len(args) == 3 && args[1] == "=":
		holds = args[0] == args[2]
	default:
		return language("a test %q", args)
	}
	if !holds {
		return errFalse
	}
	return nil
}

func (m *Machine) set(args []string) error {
	key, value, ok := strings.Cut(strings.Join(args, " "), "=")
	if len(args) != 1 || !ok || name(key) != len(key) {
		return language("set %q", args)
	}
	m.vars[key] = value
	return nil
}

func (m *Machine) echo(args []string) error {
	if len(args) > 0 && strings.HasPrefix(args[0], "-") {
		return language("echo with an option: %q", args)
	}
	m.end.Said = append(m.end.Said, strings.Join(args, " "))
	return nil
}

func (m *Machine) sleep(args []string) error {
	n, err := strconv.Atoi(strings.Join(args, " "))
	if err != nil {
		return language("sleep %q", args)
	}
	m.end.Slept = append(m.end.Slept, n)
	return nil
}

// fetch opens a file by its whole name. One without a device is the root's.
func (m *Machine) fetch(file string) ([]byte, error) {
	device, path, ok := strings.Cut(file, ")")
	if !ok || !strings.HasPrefix(device, "(") || !strings.HasPrefix(path, "/") {
		return nil, language("a file %q", file)
	}
	m.end.Fetched = append(m.end.Fetched, file)
	if m.Disk != "" && device == "("+m.Disk {
		return []byte("from the disk"), nil
	}
	if strings.HasPrefix(device, "(http,") && !m.HTTP {
		if _, err := m.Fetch("(tftp,"+device[len("(http,"):]+")", "/grub/"+m.CPU+"-efi/http.mod"); err == nil {
			return nil, language("a module that came from outside, which Secure Boot refuses")
		}
		return nil, fmt.Errorf("disk %q not found", device[1:])
	}
	return m.Fetch(device+")", path)
}

func (m *Machine) sourceFile(args []string) error {
	if len(args) != 1 {
		return language("source %q", args)
	}
	text, err := m.fetch(args[0])
	if errors.Is(err, errLanguage) {
		return err
	}
	if err != nil { // told, and no failure of the command
		m.end.Said = append(m.end.Said, "error: "+err.Error())
		return nil
	}
	return m.source(string(text))
}

// linux loads a kernel. A second one starts into nothing: so GRUB 2.02 and 2.04 of
// Ubuntu did in a virtual machine, after an initrd that had failed.
func (m *Machine) linux(args []string) error {
	how := "linux"
	if m.kernels > 0 {
		how = "nothing"
	}
	m.loaded = End{}
	if len(args) == 0 {
		return errors.New("filename expected")
	}
	data, err := m.fetch(args[0])
	if err != nil {
		return err
	}
	m.kernels++
	m.loaded = End{How: how, Kernel: data, From: args[0], Cmdline: cmdline(args)}
	return nil
}

// cmdline quotes as GRUB's loader does.
func cmdline(args []string) string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = strings.NewReplacer(`\`, `\\`, `'`, `\'`, `"`, `\"`).Replace(a)
		if strings.Contains(a, " ") {
			out[i] = `"` + out[i] + `"`
		}
	}
	return "BOOT_IMAGE=" + strings.Join(out, " ")
}

// initrd joins files, each at a multiple of four.
func (m *Machine) initrd(args []string) error {
	if m.loaded.How != "linux" && m.loaded.How != "nothing" {
		return errors.New("you need to load the kernel first")
	}
	m.loaded.Initrds = nil
	for _, file := range args {
		data, err := m.fetch(file)
		if err != nil {
			return err
		}
		m.loaded.Initrds = append(m.loaded.Initrds, data)
	}
	return nil
}

func (m *Machine) chainloader(args []string) error {
	m.loaded = End{}
	if len(args) != 1 {
		return language("chainloader %q", args)
	}
	data, err := m.fetch(args[0])
	if err != nil {
		return err
	}
	m.loaded = End{How: "chainloader", Kernel: data, From: args[0]}
	return nil
}

func (m *Machine) boot([]string) error {
	switch {
	case m.loaded.How == "":
		return errors.New("you need to load the kernel first")
	case m.Boots != nil && !m.Boots(m.loaded):
		m.loaded = End{}
		return errors.New("it does not start")
	}
	l := m.loaded
	l.Said, l.Slept, l.Fetched = m.end.Said, m.end.Slept, m.end.Fetched
	m.end = l
	return ended{}
}

func (m *Machine) search(args []string) error {
	if len(args) != 4 || args[0] != "--no-floppy" || args[1] != "--file" || !strings.HasPrefix(args[2], "--set=") {
		return language("search %q", args)
	}
	if m.Disk == "" {
		return errors.New("no such device: " + args[3])
	}
	m.vars[strings.TrimPrefix(args[2], "--set=")] = m.Disk
	return nil
}

func (m *Machine) reboot([]string) error {
	m.end.How = "reboot"
	return ended{}
}

func (m *Machine) exit([]string) error {
	m.end.How = "exit"
	return ended{}
}
