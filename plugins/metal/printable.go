package metal

import (
	"reflect"

	"github.com/better-compute/site-appliance/appliance/base/printable"
)

// legible makes every text that an answer holds printable, in place for what lies
// behind pointers and in slices.
func legible[T any](answer T) T {
	clean(reflect.ValueOf(&answer).Elem())
	return answer
}

func clean(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(printable.Text(v.String(), '?'))
	case reflect.Pointer:
		if !v.IsNil() {
			clean(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			clean(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				clean(v.Field(i))
			}
		}
	}
}
