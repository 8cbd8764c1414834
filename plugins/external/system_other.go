//go:build !linux

package external

// await waits for the process's end. Its group is killed before a new process
// can have got the number of one that is empty by now.
func (r *run) await() error {
	err := r.cmd.Wait()
	r.kill()
	r.mu.Lock()
	r.reaped = true
	r.mu.Unlock()
	return err
}

// openPinned checks the pin; the program then runs by its path.
func openPinned(path, pin string) (*program, error) {
	sum, err := SHA256File(path)
	if err != nil {
		return nil, err
	}
	if err := judge(path, sum, pin); err != nil {
		return nil, err
	}
	return &program{path: path}, nil
}
