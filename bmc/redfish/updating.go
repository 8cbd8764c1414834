package redfish

import "github.com/better-compute/site-appliance/appliance/base/errs"

// updates marks the BMC as writing firmware until done is called. One is enough.
func (m *machine) updates(component string) (done func(), err error) {
	if err := m.calm(); err != nil {
		return nil, err
	}
	if _, taken := m.pool.updating.LoadOrStore(m.config.address, component); taken {
		return nil, m.calm()
	}
	return func() { m.pool.updating.Delete(m.config.address) }, nil
}

// calm refuses what would come between a BMC and the firmware that it writes.
func (m *machine) calm() error {
	if component, busy := m.pool.updating.Load(m.config.address); busy {
		return errs.Retry(errs.BmcError, "the BMC is writing firmware of %q: this waits until that is over", component)
	}
	return nil
}
