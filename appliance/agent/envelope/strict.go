package envelope

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// StrictUnmarshal decodes data into m and refuses a field that m's type does
// not know, at any depth: what cannot be understood must not be half obeyed.
// The code is invalid-payload.
func StrictUnmarshal(data []byte, m proto.Message) error {
	if err := proto.Unmarshal(data, m); err != nil {
		return errs.New(errs.InvalidPayload, "decode %s: %v", m.ProtoReflect().Descriptor().Name(), err)
	}
	if at := unknown(m.ProtoReflect()); at != "" {
		return errs.New(errs.InvalidPayload, "%s holds a field that this version does not know", at)
	}
	return nil
}

// unknown names the first message that holds unknown fields, or is empty.
func unknown(m protoreflect.Message) (at string) {
	if len(m.GetUnknown()) > 0 {
		return string(m.Descriptor().Name())
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() == nil {
				return true
			}
			v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				at = unknown(v.Message())
				return at == ""
			})
		case f.Message() == nil:
		case f.IsList():
			for i := 0; i < v.List().Len() && at == ""; i++ {
				at = unknown(v.List().Get(i).Message())
			}
		default:
			at = unknown(v.Message())
		}
		return at == ""
	})
	return at
}
