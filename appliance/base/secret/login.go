package secret

import "encoding/json"

// Login takes a credential apart: a JSON object with username and password. What
// it lacks is empty; ok is false for what is no such object.
func Login(v Value) (username, password Value, ok bool) {
	var in struct {
		Username string `json:"username"`
		Password string `json:"password"`
	}
	if json.Unmarshal(v.Reveal(), &in) != nil {
		return Value{}, Value{}, false
	}
	return New([]byte(in.Username)), New([]byte(in.Password)), true
}
