package metal

import (
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable is text as it can be shown anywhere: what hardware says of itself
// may hold anything, and a terminal would obey some of it. Each sign that does
// not print, or that is no UTF-8, becomes "?".
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
}

// printable makes every text that an answer holds Printable, in place for what
// lies behind pointers and in slices.
func printable[T any](answer T) T {
	clean(reflect.ValueOf(&answer).Elem())
	return answer
}

func clean(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(Printable(v.String()))
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
