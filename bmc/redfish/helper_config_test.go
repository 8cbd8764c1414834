package redfish

import (
	"encoding/json"
	"io"
	"net/http"
)

// raw is the configuration.
func (b *bench) raw() json.RawMessage {
	b.t.Helper()
	config, err := json.Marshal(b.config)
	if err != nil {
		b.t.Fatal(err)
	}
	return config
}

func decodeBody(r *http.Request, into any) {
	body, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(body, into)
}
