package bmctest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	updatePath    = root + "/UpdateService"
	inventoryPath = updatePath + "/FirmwareInventory"

	// maxFirmware bounds what a BMC takes as firmware.
	maxFirmware = 64 << 20
)

// versions are the firmware's at first.
var versions = map[string]string{"BIOS": "1.0", "BMC": "1.2"}

// FirmwareImage is what a rig's BMC takes as firmware: component is "BIOS" or
// "BMC".
func FirmwareImage(component, version string) []byte {
	return []byte("rig firmware\n" + component + "\n" + version + "\n")
}

// parseFirmware reads FirmwareImage.
func parseFirmware(image []byte) (component, version string, err error) {
	lines := strings.Split(string(image), "\n")
	if len(lines) < 3 || lines[0] != "rig firmware" || versions[lines[1]] == "" || lines[2] == "" {
		return "", "", errors.New("the image is no firmware of this machine")
	}
	return lines[1], lines[2], nil
}

func (r *Redfish) version(component string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v := r.firmware[component]; v != "" {
		return v
	}
	return versions[component]
}

var updateRoutes = map[string]handler{
	"GET " + updatePath: func(x *exchange) reply {
		o := resource(updatePath, "#UpdateService.v1_8_0.UpdateService", "Update Service", object{
			"ServiceEnabled": true, "FirmwareInventory": link(inventoryPath), "Actions": object{},
		})
		if !x.r.faulty(NoFirmwarePush) {
			o["MultipartHttpPushUri"], o["HttpPushUri"], o["MaxImageSizeBytes"] = updatePath+"/upload", updatePath+"/push", maxFirmware
		}
		if !x.r.faulty(NoSimpleUpdate) {
			o["Actions"] = object{"#UpdateService.SimpleUpdate": object{
				"target": updatePath + "/Actions/UpdateService.SimpleUpdate",
				"TransferProtocol@Redfish.AllowableValues": []string{"HTTPS"},
			}}
		}
		return ok(o)
	},
	"GET " + inventoryPath: func(x *exchange) reply {
		return x.collection("SoftwareInventoryCollection", "Firmware", inventoryPath+"/BIOS", inventoryPath+"/BMC")
	},
	"GET " + inventoryPath + "/{component}": func(x *exchange) reply {
		name := x.req.PathValue("component")
		if versions[name] == "" {
			return missing()
		}
		return ok(resource(inventoryPath+"/"+name, "#SoftwareInventory.v1_3_0.SoftwareInventory", name, object{
			"Version": x.r.version(name), "Updateable": true, "SoftwareId": "RIG-" + name, "Status": healthy(),
		}))
	},
	"POST " + updatePath + "/Actions/UpdateService.SimpleUpdate": func(x *exchange) reply {
		if x.r.faulty(NoSimpleUpdate) {
			return missing()
		}
		var in struct {
			ImageURI, TransferProtocol, Username, Password string
			Targets                                        []string
			ApplyTime                                      string `json:"@Redfish.OperationApplyTime"`
		}
		if bad := x.decode(&in); bad != nil {
			return *bad
		}
		if in.TransferProtocol != "" && in.TransferProtocol != "HTTPS" {
			return refuse("The transfer protocol is not one that the service has.")
		}
		image, err := x.r.fetch(x.req.Context(), in.ImageURI, maxFirmware)
		if err != nil {
			return unfetched(err)
		}
		return x.r.update(image, in.Targets, in.ApplyTime)
	},
	"POST " + updatePath + "/push": func(x *exchange) reply {
		if x.r.faulty(NoFirmwarePush) {
			return missing()
		}
		image, err := io.ReadAll(io.LimitReader(x.req.Body, maxFirmware))
		if err != nil {
			return fail(http.StatusBadRequest, "Base.1.8.GeneralError", "The image did not arrive whole.")
		}
		return x.r.update(image, nil, "")
	},
	"POST " + updatePath + "/upload": uploadFirmware,
}

// uploadFirmware takes the parts UpdateParameters and UpdateFile
// (DSP0266, multipart HTTP push).
func uploadFirmware(x *exchange) reply {
	if x.r.faulty(NoFirmwarePush) {
		return missing()
	}
	bad := func(message string) reply { return fail(http.StatusBadRequest, "Base.1.8.GeneralError", message) }
	parts, err := x.req.MultipartReader()
	if err != nil {
		return fail(http.StatusUnsupportedMediaType, "Base.1.8.GeneralError", "The upload is not multipart/form-data.")
	}
	var in struct {
		Targets   []string
		ApplyTime string `json:"@Redfish.OperationApplyTime"`
	}
	var image []byte
	for i := 0; ; i++ {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return bad("The upload did not arrive whole.")
		}
		content, err := io.ReadAll(io.LimitReader(part, maxFirmware))
		switch {
		case err != nil:
			return bad("The upload did not arrive whole.")
		case part.FormName() == "UpdateParameters" && i == 0:
			if !strings.HasPrefix(part.Header.Get("Content-Type"), "application/json") || json.Unmarshal(content, &in) != nil {
				return bad("UpdateParameters is not JSON.")
			}
		case part.FormName() == "UpdateFile" && i == 1:
			image = content
		default:
			return bad("The parts are not UpdateParameters and then UpdateFile.")
		}
	}
	return x.r.update(image, in.Targets, in.ApplyTime)
}

// update begins the task that writes image.
func (r *Redfish) update(image []byte, targets []string, applyTime string) reply {
	component, version, err := parseFirmware(image)
	if err != nil {
		return fail(http.StatusBadRequest, "Update.1.0.VerificationFailed", err.Error())
	}
	if len(targets) > 0 && !slices.Contains(targets, inventoryPath+"/"+component) {
		return refuse("The image is for " + component + ", which is no target.")
	}
	if applyTime != "" && applyTime != "Immediate" && applyTime != "OnReset" {
		return refuse("The apply time is not one that the service has.")
	}
	r.note("firmware %s %s", component, version)
	return r.begin("Update firmware", r.atBoot(FirmwareAtBoot, applyTime), func(r *Redfish) {
		if r.faults.strike(FirmwareUnchanged) {
			return
		}
		if r.firmware == nil {
			r.firmware = map[string]string{}
		}
		r.firmware[component] = version
	})
}

// errUnverified is a server whose certificate the BMC has no CA for.
var errUnverified = errors.New("the certificate of the server could not be verified")

// fetch reads what is at address, over verified TLS, up to limit bytes.
func (r *Redfish) fetch(ctx context.Context, address string, limit int64) ([]byte, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("the URI is not an https URL")
	}
	if r.faulty(MediaCannotVerify) {
		return nil, errUnverified
	}
	roots := r.options.mediaRoots
	if roots == nil {
		roots = x509.NewCertPool() // not the system's
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true, DialContext: r.options.dial}
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, errors.New("the URI is not an https URL")
	}
	req.Header.Set("User-Agent", "rig-bmc")
	resp, err := client.Do(req)
	var verify *tls.CertificateVerificationError
	if errors.As(err, &verify) {
		return nil, errUnverified
	}
	if err != nil {
		return nil, fmt.Errorf("the server did not answer: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the server answered %d", resp.StatusCode)
	}
	content := new(bytes.Buffer)
	if _, err := io.Copy(content, io.LimitReader(resp.Body, limit)); err != nil {
		return nil, fmt.Errorf("the transfer ended early: %w", err)
	}
	return content.Bytes(), nil
}

// unfetched answers that something could not be fetched.
func unfetched(err error) reply {
	return fail(http.StatusBadRequest, "Base.1.8.CouldNotEstablishConnection", "The image could not be had: "+err.Error()+".")
}
