package redfish

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// step is one change of a layout.
type step struct {
	array  array
	remove *volume       // to delete
	make   *metal.Volume // or to create, of these drives
	drives []string      // paths
}

func (s step) String() string {
	if s.remove != nil {
		return "delete volume " + legible(s.remove.Name)
	}
	return "create volume " + legible(s.make.Name)
}

// placed is a wanted volume with what its names stand for.
type placed struct {
	metal.Volume
	array  int
	drives []string
}

// place finds the drives and the controller of every wanted volume; it refuses
// what cannot be, before anything is changed.
func place(arrays []array, l metal.Layout) ([]placed, error) {
	var out []placed
	for _, v := range l.Volumes {
		at := -1
		var paths []string
		for _, name := range v.Drives {
			where, path, err := locate(arrays, v, name)
			switch {
			case err != nil:
				return nil, err
			case at >= 0 && where != at:
				return nil, errs.New(errs.InvalidArgs, "volume %q: its drives are at different controllers", v.Name)
			case slices.Contains(paths, path):
				return nil, errs.New(errs.InvalidArgs, "volume %q: drive %q is another name of one of its drives", v.Name, name)
			}
			at, paths = where, append(paths, path)
		}
		switch {
		case at < 0:
			return nil, errs.New(errs.InvalidArgs, "volume %q has no drives", v.Name)
		case arrays[at].collection == "":
			return nil, errs.New(errs.UnsupportedOperation, "controller %s makes no volumes", arrays[at].id)
		case arrays[at].levels != nil && !slices.Contains(arrays[at].levels, "RAID"+v.Level):
			return nil, errs.New(errs.UnsupportedOperation, "controller %s does not offer level %s", arrays[at].id, v.Level)
		}
		out = append(out, placed{v, at, paths})
	}
	return out, nil
}

// locate finds the one drive that a volume means by a name.
func locate(arrays []array, v metal.Volume, name string) (int, string, error) {
	at, path := -1, ""
	for i, a := range arrays {
		if v.Controller != "" && v.Controller != a.id && v.Controller != a.name {
			continue
		}
		for _, d := range a.drives {
			if !slices.Contains(d.names, name) {
				continue
			}
			if at >= 0 {
				return 0, "", errs.New(errs.InvalidArgs, "volume %q: several drives are called %q: name it by its serial number", v.Name, name)
			}
			at, path = i, d.path
		}
	}
	if at < 0 {
		return 0, "", errs.New(errs.InvalidArgs, "volume %q: there is no drive %q%s; inspect.inspect names them", v.Name, name, under(v.Controller))
	}
	return at, path, nil
}

func under(controller string) string {
	if controller == "" {
		return ""
	}
	return " at controller " + controller
}

// steps are what makes the volumes exactly the wanted ones: what is as wanted
// stays, the others go, and then the rest is made.
func steps(arrays []array, wanted []placed) []step {
	kept := map[string]bool{}
	var creates []step
	for _, w := range wanted {
		i := slices.IndexFunc(arrays[w.array].volumes, func(v volume) bool { return !kept[v.path] && as(v, w) })
		if i >= 0 {
			kept[arrays[w.array].volumes[i].path] = true
			continue
		}
		creates = append(creates, step{array: arrays[w.array], make: &w.Volume, drives: w.drives})
	}
	var list []step
	for _, a := range arrays {
		for _, v := range a.volumes {
			if !kept[v.path] {
				list = append(list, step{array: a, remove: &v})
			}
		}
	}
	return append(list, creates...)
}

// as says whether a volume is what is wanted. Controllers round sizes.
func as(v volume, w placed) bool {
	if v.Name != w.Name || v.Level != w.Level || len(v.drives) != len(w.drives) {
		return false
	}
	for _, d := range w.drives {
		if !slices.Contains(v.drives, d) {
			return false
		}
	}
	difference := max(v.SizeBytes, w.SizeBytes) - min(v.SizeBytes, w.SizeBytes)
	return w.SizeBytes == 0 || difference <= w.SizeBytes/100
}

func (p *provider) applyLayout(ctx context.Context, l metal.Layout) (metal.Applied, error) {
	arrays, err := p.arrays(ctx)
	if err != nil {
		return metal.Applied{}, err
	}
	wanted, err := place(arrays, l)
	if err != nil {
		return metal.Applied{}, err
	}
	todo := steps(arrays, wanted)
	var done []string
	applied := metal.Applied{}
	for i, s := range todo {
		waits, err := p.step(ctx, s)
		if err != nil {
			return metal.Applied{}, account(err, s, done, todo[i+1:])
		}
		if waits {
			applied.RebootNeeded = true
			done = append(done, s.String()+" at the next boot")
			continue
		}
		done = append(done, s.String())
	}
	if applied.RebootNeeded || len(todo) == 0 {
		return applied, nil
	}
	if arrays, err = p.arrays(ctx); err == nil {
		if wanted, err = place(arrays, l); err == nil {
			if left := steps(arrays, wanted); len(left) > 0 {
				err = errs.New(errs.BmcError, "the volumes are not as wanted: %s is left to do", left[0])
			}
		}
	}
	if err != nil {
		return metal.Applied{}, errs.New(errs.CodeOf(err), "%s; done: %s", errs.From(err).Message, strings.Join(done, ", "))
	}
	return applied, nil
}

// account says with a step's error what was done before it and what was not.
func account(err error, s step, done []string, left []step) error {
	text := "done: nothing"
	if len(done) > 0 {
		text = "done: " + strings.Join(done, ", ")
	}
	if len(left) > 0 {
		var rest []string
		for _, l := range left {
			rest = append(rest, l.String())
		}
		text += "; not begun: " + strings.Join(rest, ", ")
	}
	return errs.New(errs.CodeOf(err), "%s: %s; %s", s, errs.From(err).Message, text)
}

// step does one change and reads it back. It reports whether the change waits
// for the machine's next boot.
func (p *provider) step(ctx context.Context, s step) (waits bool, err error) {
	var a *answer
	if s.remove != nil {
		if err := p.still(ctx, s); err != nil {
			return false, err
		}
		// Not again where the answer is lost: another volume may be there by then.
		a, err = p.change(ctx, http.MethodDelete, s.remove.path, nil, false)
	} else {
		a, err = p.create(ctx, s)
	}
	if err != nil && !unclear(err) {
		return false, err
	}
	if err == nil {
		end, failed := p.follow(ctx, a, job{doing: s.String(), atBoot: true})
		if failed != nil {
			return false, failed
		}
		if end.waits {
			return true, nil
		}
	}
	ok, last := p.until(ctx, p.timing.settle, func(ctx context.Context) (bool, error) { return p.stepped(ctx, s) })
	switch {
	case ok:
		return false, nil
	case err != nil: // unclear, and it does not show
		return false, err
	case last != nil:
		return false, last
	case s.remove != nil:
		return false, errs.New(errs.BmcError, "the BMC accepted it, and the volume is still there")
	}
	return false, errs.New(errs.BmcError, "the BMC accepted it, and the volume is not there")
}

// still reads a volume again before it is deleted: a BMC that numbers its volumes
// anew after each change has another one at its path.
func (p *provider) still(ctx context.Context, s step) error {
	o, err := p.get(ctx, s.remove.path)
	if absent(err) {
		return errs.New(errs.BmcError, "there is no volume at %s any more: nothing was deleted, read the layout again", s.remove.path)
	}
	if err != nil {
		return err
	}
	now, ok := p.volume(s.remove.path, o, s.array)
	if !ok || !now.same(*s.remove) {
		return errs.New(errs.BmcError, "another volume, %s, is at %s by now: nothing was deleted, read the layout again", legible(now.Name), s.remove.path)
	}
	return nil
}

// same reports whether v is the volume that was seen before.
func (v volume) same(seen volume) bool {
	return v.Name == seen.Name && v.Level == seen.Level && v.SizeBytes == seen.SizeBytes && slices.Equal(v.drives, seen.drives) && slices.Equal(v.ids, seen.ids)
}

// stepped looks whether a step shows.
func (p *provider) stepped(ctx context.Context, s step) (bool, error) {
	now, err := p.array(ctx, s.array.path)
	if err != nil {
		return false, err
	}
	for _, v := range now.volumes {
		switch {
		case s.remove != nil && v.path == s.remove.path && v.same(*s.remove):
			return false, nil
		case s.remove == nil && as(v, placed{Volume: *s.make, drives: s.drives}):
			return true, nil
		}
	}
	return s.remove != nil, nil
}

// typesOf are the words for levels where RAIDType is not known.
var typesOf = map[string]string{"0": "NonRedundant", "1": "Mirrored", "5": "StripedWithParity", "10": "SpannedMirrors", "50": "SpannedStripesWithParity"}

// create asks for a volume, in the words of the standard and, where the BMC
// refuses those for good, in those of its older versions.
func (p *provider) create(ctx context.Context, s step) (*answer, error) {
	drives := []map[string]string{}
	for _, path := range s.drives {
		drives = append(drives, map[string]string{"@odata.id": path})
	}
	base := map[string]any{"Name": s.make.Name}
	if s.make.SizeBytes > 0 {
		base["CapacityBytes"] = s.make.SizeBytes
	}
	if time, ok := pick(s.array.times, "Immediate", applyTime); ok && s.array.times != nil {
		base["@Redfish.OperationApplyTime"] = time
	}
	body := func(more map[string]any) map[string]any {
		for key, value := range base {
			more[key] = value
		}
		return more
	}
	forms := []map[string]any{body(map[string]any{"RAIDType": "RAID" + s.make.Level, "Links": map[string]any{"Drives": drives}})}
	if old := typesOf[s.make.Level]; old != "" {
		forms = append(forms, body(map[string]any{"VolumeType": old, "Drives": drives}))
	}
	a, err := p.write(ctx, http.MethodPost, s.array.collection, forms[0])
	if statusOf(err) != http.StatusBadRequest || len(forms) == 1 {
		return a, err
	}
	a, second := p.write(ctx, http.MethodPost, s.array.collection, forms[1])
	if statusOf(second) == http.StatusBadRequest {
		return nil, errs.New(errs.BmcError, "%s; in older words: %s", errs.From(err).Message, answerOf(second).reason())
	}
	return a, second
}
