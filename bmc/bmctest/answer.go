package bmctest

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
)

// write sends an answer with what the faults make of it.
func (r *Redfish) write(w http.ResponseWriter, req *http.Request, answer reply) {
	h := w.Header()
	h.Set("OData-Version", "4.0")
	for name, value := range answer.header {
		if name == "Location" {
			value = r.location(value)
		}
		h.Set(name, value)
	}
	if answer.body == nil {
		w.WriteHeader(answer.status)
		return
	}
	read := (req.Method == http.MethodGet || req.Method == http.MethodHead) && answer.status == http.StatusOK
	if read {
		etag := r.etag(r.tag(answer.body))
		answer.body["@odata.etag"] = etag
		if !r.faulty(EtagInBodyOnly) {
			h.Set("ETag", etag)
		}
	}
	text, err := json.Marshal(r.odd(answer.body))
	if err != nil {
		panic(err)
	}
	h.Set("Content-Type", "application/json")
	if read && strings.HasPrefix(req.URL.Path, "/redfish/v1") {
		switch {
		case r.strike(NotJSON):
			h.Set("Content-Type", "text/html")
			text = []byte("<!DOCTYPE html><html><body>Please log in.</body></html>")
		case r.strike(CutJSON):
			text = text[:len(text)/2]
		case r.strike(DeepJSON):
			const depth = 100_000
			text = append(text[:len(text)-1], (`,"Oem":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + "}")...)
		case r.strike(EndlessBody):
			endless(req.Context(), w, text)
			return
		}
	}
	w.WriteHeader(answer.status)
	_, _ = w.Write(append(text, '\n'))
}

// endless goes on with strings in an array until the client is gone, and at
// most for a GiB.
func endless(ctx context.Context, w io.Writer, text []byte) {
	_, err := w.Write(append(text[:len(text)-1], `,"Oem":["`...))
	chunk := bytes.Repeat([]byte(`x","`), 16<<10)
	for sent := 0; err == nil && ctx.Err() == nil && sent < 1<<30; sent += len(chunk) {
		_, err = w.Write(chunk)
	}
	panic(http.ErrAbortHandler)
}

// location is a path as a Location header has it.
func (r *Redfish) location(path string) string {
	switch {
	case !strings.HasPrefix(path, "/"):
		return path
	case r.faulty(ForeignLocation):
		return r.options.foreign + path
	case r.faulty(AbsoluteLinks):
		return "https://" + r.Addr() + path
	case r.faulty(SlashInLinks):
		return path + "/"
	}
	return path
}

// linkKeys are the properties that hold a path.
var linkKeys = map[string]bool{
	"@odata.id": true, "target": true, "@Redfish.ActionInfo": true, "Members@odata.nextLink": true,
	"HttpPushUri": true, "MultipartHttpPushUri": true, "TaskMonitor": true,
}

// oddities are what OddTypes makes of a property.
var oddities = map[string]any{
	"SerialNumber": 1234, "Model": 42, "Manufacturer": []any{"Better Compute"}, "PartNumber": 7, "SKU": false, "UUID": 0,
	"BiosVersion": 2.1, "FirmwareVersion": 1.2, "HostName": object{}, "AssetTag": nil, "MACAddress": 0, "Version": 3,
	"SpeedMbps": "N/A", "Count": "two", "TotalSystemMemoryGiB": "64 GiB", "TotalCores": "N/A", "TotalThreads": "", "CapacityMiB": "32 GB",
	"MaxSpeedMHz": "N/A", "ReadingCelsius": "N/A", "PowerConsumedWatts": "N/A", "Reading": "N/A", "Status": nil, "ProcessorSummary": nil, "Protocol": 4,
	"LinkStatus": 1, "Severity": 3, "Created": 0, "DateTime": 0, "MediaType": 9, "BlockSizeBytes": "N/A",
}

// escapes clears a terminal and renames its window.
const escapes = "\x1b[2J\x1b]0;owned\x07"

// odd is body with links, types and texts as the faults have them.
func (r *Redfish) odd(body object) any {
	r.mu.Lock()
	on := r.faults.on
	types, texts := on(OddTypes), on(TerminalEscapes)
	path := func(p string) string { return p }
	switch {
	case on(ForeignLinks):
		path = func(p string) string { return r.options.foreign + p }
	case on(AbsoluteLinks):
		path = func(p string) string { return "https://" + r.Addr() + p }
	case on(SlashInLinks):
		path = func(p string) string {
			if strings.ContainsAny(p, "?#") || strings.HasSuffix(p, "/") || strings.Contains(p, "/Actions/") {
				return p
			}
			return p + "/"
		}
	}
	r.mu.Unlock()
	return odd(body, path, types, texts)
}

func odd(v any, path func(string) string, types, texts bool) any {
	switch v := v.(type) {
	case object:
		out := object{}
		for key, value := range v {
			text, isText := value.(string)
			strange, isStrange := oddities[key]
			switch {
			case isText && linkKeys[key] && strings.HasPrefix(text, "/"):
				out[key] = path(text)
			case key == "Attributes":
				out[key] = value
			case types && isStrange:
				out[key] = strange
			case isText && texts && (key == "SerialNumber" || key == "Model" || key == "Manufacturer" || key == "Message"):
				out[key] = text + escapes
			default:
				out[key] = odd(value, path, types, texts)
			}
		}
		return out
	case []object:
		out := make([]any, len(v))
		for i, value := range v {
			out[i] = odd(value, path, types, texts)
		}
		return out
	}
	return v
}
