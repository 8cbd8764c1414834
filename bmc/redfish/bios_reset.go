package redfish

import (
	"context"
	"maps"
	"net/http"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// dellJob makes the job without which a Dell BMC leaves pending values pending.
// Where there may be one already, a refusal of a second is as good.
func (p *provider) dellJob(ctx context.Context, b bios, a *answer, perhaps bool) error {
	if path, _ := p.begun(a); path != "" || !b.separate {
		return nil // it made one by itself
	}
	jobs := p.dellJobs(ctx)
	if jobs == "" {
		return nil
	}
	created, err := p.write(ctx, http.MethodPost, jobs, map[string]string{"TargetSettingsURI": b.pending})
	if err == nil {
		_, err = p.follow(ctx, created, job{doing: "schedule firmware settings", atBoot: true, silent: true})
	}
	if perhaps && objected(err) {
		return nil
	}
	if err != nil {
		return errs.New(errs.CodeOf(err), "the settings are pending, and no job applies them: %s", errs.From(err).Message)
	}
	return nil
}

// dellJobs is the path of a Dell manager's job queue; empty: there is none.
func (p *provider) dellJobs(ctx context.Context) string {
	path, manager, err := p.manager(ctx)
	if err != nil {
		return ""
	}
	if jobs := p.link(manager.object("Links").object("Oem").object("Dell"), "Jobs"); jobs != "" {
		return jobs
	}
	if manager.object("Oem").object("Dell") == nil && manager.object("Links").object("Oem").object("Dell") == nil {
		return ""
	}
	return strings.TrimSuffix(path, "/") + "/Jobs"
}

func (p *provider) resetSettings(ctx context.Context) (metal.Applied, error) {
	b, err := p.bios(ctx)
	if err != nil {
		return metal.Applied{}, err
	}
	target := b.resource.object("Actions").object("#Bios.ResetBios").text("target")
	if target == "" {
		return metal.Applied{}, errs.New(errs.UnsupportedOperation, "the BMC does not reset firmware settings")
	}
	path, err := p.resource(target)
	if err != nil {
		return metal.Applied{}, err
	}
	a, err := p.write(ctx, http.MethodPost, path, struct{}{})
	if err == nil {
		_, err = p.follow(ctx, a, job{doing: "reset firmware settings", atBoot: true, silent: true})
	}
	if err != nil && !unclear(err) {
		return metal.Applied{}, err
	}
	defaults, regErr := p.registry(ctx, b)
	if regErr != nil {
		return metal.Applied{}, regErr
	}
	told := "nothing"
	ok, last := p.until(ctx, p.timing.settle, func(ctx context.Context) (bool, error) {
		after, err := p.bios(ctx)
		if err != nil {
			return false, err
		}
		told = after.afterReset(b, defaults)
		return told == "reset", nil
	})
	switch {
	case ok:
		return metal.Applied{RebootNeeded: true}, nil
	case err != nil: // unclear, and nothing shows that it was done
		return metal.Applied{}, err
	case last != nil:
		return metal.Applied{}, last
	case told == "refused":
		return metal.Applied{}, errs.New(errs.BmcError, "the BMC accepted the reset of its settings and shows none pending")
	}
	p.log.Info("the BMC accepted the reset of its settings and cannot show it before the next boot")
	return metal.Applied{RebootNeeded: true}, nil
}

// afterReset says what can be seen of a reset: "reset", "refused" where the BMC
// says that none is pending and its values are not the maker's, else "nothing".
func (b bios) afterReset(before bios, known map[string]attribute) string {
	pending, said := b.resource.boolean("ResetBiosToDefaultsPending")
	if pending || !maps.EqualFunc(b.next, before.next, same) || !maps.EqualFunc(b.current, before.current, same) {
		return "reset"
	}
	judged := false
	for name, a := range known {
		now, has := b.next[name]
		if !has || a.standard == nil || a.readOnly {
			continue
		}
		judged = true
		if !same(now, a.standard) {
			if said {
				return "refused"
			}
			return "nothing"
		}
	}
	if judged {
		return "reset"
	}
	if said {
		return "refused"
	}
	return "nothing"
}
