package main

// keyboard finds the console's own commands in what a person types: a ~ that comes
// first or after Enter begins one. All else goes to the machine.
type keyboard struct {
	fresh, pending bool
}

// What a command asks for.
const (
	keyNone = iota
	keyEnd
	keyHelp
)

const keysHelp = "Enter ~ .  ends the console\r\nEnter ~ ?  shows this\r\nEnter ~ ~  sends one ~"

// take is what goes to the machine, and the first command; what comes after keyEnd
// is nobody's.
func (k *keyboard) take(typed []byte) (send []byte, command int) {
	for _, b := range typed {
		if k.pending {
			k.pending = false
			switch b {
			case '.':
				return send, keyEnd
			case '?':
				command, k.fresh = keyHelp, true
				continue
			case '~':
			default:
				send = append(send, '~')
			}
		} else if b == '~' && k.fresh {
			k.pending = true
			continue
		}
		send = append(send, b)
		k.fresh = b == '\r' || b == '\n'
	}
	return send, command
}
