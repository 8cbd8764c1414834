package bmctest

import (
	"slices"
	"strconv"
	"strings"
)

// Fault is something that a Redfish BMC does wrong, or its own way. Without
// any, the rig keeps to the standard; several can be on at once.
type Fault string

// Boot override.
const (
	// BootRevertsToOnce (Supermicro): a Boot object without
	// BootSourceOverrideEnabled makes a continuous override a single one.
	BootRevertsToOnce Fault = "boot-reverts-to-once"
	// BootContinuousBecomesOnce: Continuous is accepted, Once is what is kept.
	BootContinuousBecomesOnce Fault = "boot-continuous-becomes-once"
	// BootContinuousRefused: Continuous is 400, and the allowable values of
	// BootSourceOverrideEnabled name Once and Disabled only.
	BootContinuousRefused Fault = "boot-continuous-refused"
	// BootModeLost (Supermicro): the mode falls back to Legacy unless it is sent.
	BootModeLost Fault = "boot-mode-lost"
	// BootModeRefused (Dell): a Boot object with BootSourceOverrideMode is 400.
	BootModeRefused Fault = "boot-mode-refused"
	// BootWhole: a Boot object is 400 unless it has Enabled, Target and Mode.
	BootWhole Fault = "boot-whole"
	// BootSettings (iDRAC10): Boot is written to the settings object that the
	// system's @Redfish.Settings names; the system itself answers 400.
	BootSettings Fault = "boot-settings"
	// BootIgnored: the override is answered 204 and not set.
	BootIgnored Fault = "boot-ignored"
	// BootShownLate: the first two reads after a write show the old override.
	BootShownLate Fault = "boot-shown-late"
	// BusyInPOST (HPE): a PATCH is 400, UnableToModifyDuringSystemPOST, and a
	// later one is taken. With Times it lasts for so many requests.
	BusyInPOST Fault = "busy-in-post"
)

// Entity tags.
const (
	// EtagNeeded: a PATCH without If-Match is 428.
	EtagNeeded Fault = "etag-needed"
	// EtagStrong: tags are sent as W/"x", and only "x" matches; anything else, no
	// If-Match too, is 412.
	EtagStrong Fault = "etag-strong"
	// EtagWeak: only the tag exactly as it was sent, W/"x", matches; anything
	// else, no If-Match too, is 412.
	EtagWeak Fault = "etag-weak"
	// EtagDoubledQuotes: tags are sent as "x", and only ""x"" matches.
	EtagDoubledQuotes Fault = "etag-doubled-quotes"
	// EtagStarOnly: only If-Match: * is taken.
	EtagStarOnly Fault = "etag-star-only"
	// EtagRefused: any If-Match is 412.
	EtagRefused Fault = "etag-refused"
	// EtagOnActions: a POST to an action is 412 without the If-Match of the
	// resource that has the action.
	EtagOnActions Fault = "etag-on-actions"
	// EtagInBodyOnly: tags are in @odata.etag and in no header.
	EtagInBodyOnly Fault = "etag-in-body-only"
	// EtagRaces: a PATCH with the right tag is 412, since the resource changed in
	// between; the tag is another one after it. Use it with Times.
	EtagRaces Fault = "etag-races"
)

// BIOS settings.
const (
	// BiosOnlyInSettings: the attributes are in the settings object alone.
	BiosOnlyInSettings Fault = "bios-only-in-settings"
	// BiosShownEarly: pending values are shown as the current ones before a boot.
	BiosShownEarly Fault = "bios-shown-early"
	// BiosNoSettings: there is no settings object; the Bios resource itself is
	// patched, and the values hold from the next boot.
	BiosNoSettings Fault = "bios-no-settings"
	// BiosWantsApplyTime (Dell): values sent without @Redfish.SettingsApplyTime
	// are kept in the settings object, and no boot applies them.
	BiosWantsApplyTime Fault = "bios-wants-apply-time"
	// BiosRefusesApplyTime: @Redfish.SettingsApplyTime is 400.
	BiosRefusesApplyTime Fault = "bios-refuses-apply-time"
	// BiosDropsValues: pending values are gone after the boot, the old ones stay.
	BiosDropsValues Fault = "bios-drops-values"
)

// Tasks: of BIOS settings, volumes and firmware.
const (
	// TaskCritical: the task says Completed with status Critical, nothing is done.
	TaskCritical Fault = "task-critical"
	// TaskException: the task ends in Exception, nothing is done.
	TaskException Fault = "task-exception"
	// TaskVanishes: once it is over the task is 404; its work is done.
	TaskVanishes Fault = "task-vanishes"
	// TaskNeverEnds: the task stays Running.
	TaskNeverEnds Fault = "task-never-ends"
	// TaskInLocation (Dell): Location names the task instead of its monitor.
	TaskInLocation Fault = "task-in-location"
	// TaskMonitorOnly: Location names a task monitor, which is 202 without a body
	// while the task runs and 204 at its end; no Task is shown.
	TaskMonitorOnly Fault = "task-monitor-only"
	// TaskUnnamed: 202 with neither Location nor body.
	TaskUnnamed Fault = "task-unnamed"
)

// Virtual media.
const (
	// MediaPatchOnly: no actions; Image and Inserted are patched.
	MediaPatchOnly Fault = "media-patch-only"
	// MediaWantsCredentials: an insert without UserName and Password, which may
	// be empty strings, is 400.
	MediaWantsCredentials Fault = "media-wants-credentials"
	// MediaWantsTransfer: an insert without TransferProtocolType and
	// TransferMethod is 400.
	MediaWantsTransfer Fault = "media-wants-transfer"
	// MediaImageOnly: an insert with anything but Image is 400.
	MediaImageOnly Fault = "media-image-only"
	// MediaEjectLeavesImage: after an eject Inserted is false, Image and ConnectedVia
	// as before.
	MediaEjectLeavesImage Fault = "media-eject-leaves-image"
	// MediaEjectEmptyFails: an eject of an empty slot is 400.
	MediaEjectEmptyFails Fault = "media-eject-empty-fails"
	// MediaOccupiedFails: an insert into a slot that holds something is 400.
	MediaOccupiedFails Fault = "media-occupied-fails"
	// MediaCannotVerify: the BMC has no CA that it could verify the server with,
	// and says so with 400, before any connection.
	MediaCannotVerify Fault = "media-cannot-verify"
	// MediaIgnored: the insert is answered 204, and the slot stays empty.
	MediaIgnored Fault = "media-ignored"
	// MediaShownLate: the first two reads after an insert show an empty slot.
	MediaShownLate Fault = "media-shown-late"
	// MediaUnderSystem: the slots are the system's, the manager has none.
	MediaUnderSystem Fault = "media-under-system"
)

// The tree of resources.
const (
	// ManagerAmongSystems: the first of the systems is a Managers path.
	ManagerAmongSystems Fault = "manager-among-systems"
	// ManagerAsSystem: the one member of the systems is a Managers path.
	ManagerAsSystem Fault = "manager-as-system"
	// SeveralSystems: a second system is there; what is done to it is logged
	// with "second: " before it.
	SeveralSystems Fault = "several-systems"
	// SlashNeeded: a path without a slash at its end is 404, actions excepted;
	// links have none.
	SlashNeeded Fault = "slash-needed"
	// SlashInLinks: links end in a slash, and a path without one is 404.
	SlashInLinks Fault = "slash-in-links"
	// SlashRefused: a path with a slash at its end is 404, the root's excepted.
	SlashRefused Fault = "slash-refused"
	// SlashRedirects: a path without a slash at its end, the root's and actions
	// excepted, is 308 to the path with one.
	SlashRedirects Fault = "slash-redirects"
	// MembersPaged: collections have pages of one member, the first of none.
	MembersPaged Fault = "members-paged"
	// MembersEndless: the next page of a collection is always another one.
	MembersEndless Fault = "members-endless"
	// LogUnderManager: the event log is the manager's.
	LogUnderManager Fault = "log-under-manager"
	// Bare: systems with power and boot override, sessions, accounts and managers;
	// no BIOS, storage, media, update service, event log or secure boot.
	Bare Fault = "bare"
)

// Other hosts.
const (
	// ForeignRedirect: requests below the service root are 307 to the host of
	// Foreign.
	ForeignRedirect Fault = "foreign-redirect"
	// ForeignLinks: every @odata.id and action target is a URL of that host.
	ForeignLinks Fault = "foreign-links"
	// ForeignLocation: every Location is a URL of that host.
	ForeignLocation Fault = "foreign-location"
	// AbsoluteLinks: every @odata.id, target and Location is a URL of the BMC itself.
	AbsoluteLinks Fault = "absolute-links"
	// OutsideLinks: the links of the systems leave /redfish/ ("/cgi/system").
	OutsideLinks Fault = "outside-links"
)

// Sessions and accounts.
const (
	// SessionsFull: others hold all sessions; opening one is 503.
	SessionsFull Fault = "sessions-full"
	// NoSessions: there is no session service, only basic authentication.
	NoSessions Fault = "no-sessions"
	// NoBasic: basic authentication is 401.
	NoBasic Fault = "no-basic"
	// SessionsExpire: a session ends after three requests; with Times, so many
	// sessions do.
	SessionsExpire Fault = "sessions-expire"
	// SessionsDead: a session opens, and every request with it is 401.
	SessionsDead Fault = "sessions-dead"
	// SessionUnnamed: a new session has no Location, its body names it.
	SessionUnnamed Fault = "session-unnamed"
	// PasswordChangeRequired: everything but sessions and the own account is 403
	// until the password is changed.
	PasswordChangeRequired Fault = "password-change-required"
	// PasswordLimit16: a new password over 16 bytes is 400.
	PasswordLimit16 Fault = "password-limit-16"
	// PasswordLimit20: a new password over 20 bytes is 400.
	PasswordLimit20 Fault = "password-limit-20"
	// PasswordTruncated: a new password is cut at 16 bytes, and only that logs in.
	PasswordTruncated Fault = "password-truncated"
	// PasswordIgnored: the change is answered 204, the old password stays.
	PasswordIgnored Fault = "password-ignored"
	// PasswordEndsSessions: a changed password ends the sessions of the account.
	PasswordEndsSessions Fault = "password-ends-sessions"
	// AccountSlots (Dell): the accounts are sixteen slots, most without a name.
	AccountSlots Fault = "account-slots"
)

// Power.
const (
	// SoftIgnored: the operating system ignores a soft power-off.
	SoftIgnored Fault = "soft-ignored"
	// ActionInfoOnly: the reset types are in @Redfish.ActionInfo alone.
	ActionInfoOnly Fault = "action-info-only"
	// ResetTypesUnsaid: the reset types are nowhere.
	ResetTypesUnsaid Fault = "reset-types-unsaid"
	// NoPowerCycle: the reset types have no PowerCycle.
	NoPowerCycle Fault = "no-power-cycle"
	// NoNMI: the reset types have no Nmi.
	NoNMI Fault = "no-nmi"
	// GracefulOnly: the reset types are On, GracefulShutdown and GracefulRestart.
	GracefulOnly Fault = "graceful-only"
	// ForcedOnly: the reset types are ForceOn, ForceOff and ForceRestart.
	ForcedOnly Fault = "forced-only"
	// PowerShownLate: the first two reads after an action show PoweringOn,
	// PoweringOff or, after a restart, On.
	PowerShownLate Fault = "power-shown-late"
	// PowerIgnored: an action is answered 204, and nothing happens.
	PowerIgnored Fault = "power-ignored"
	// PowerSameRefused: On of a machine that is on, ForceOff of one that is off: 409.
	PowerSameRefused Fault = "power-same-refused"
)

// Storage and firmware.
const (
	// VolumesAtBoot: volumes are made and deleted at the next boot, the task waits.
	VolumesAtBoot Fault = "volumes-at-boot"
	// VolumesOldTypes: volumes have VolumeType ("Mirrored") and no RAIDType.
	VolumesOldTypes Fault = "volumes-old-types"
	// VolumesReadOnly: making or deleting a volume is 405.
	VolumesReadOnly Fault = "volumes-read-only"
	// VolumesRenumbered: after a volume is deleted those behind it move up by one.
	VolumesRenumbered Fault = "volumes-renumbered"
	// FirmwareUnchanged: the task completes, the version is the old one.
	FirmwareUnchanged Fault = "firmware-unchanged"
	// FirmwareAtBoot: firmware is written at the next boot, the task waits.
	FirmwareAtBoot Fault = "firmware-at-boot"
	// NoSimpleUpdate: firmware can only be pushed.
	NoSimpleUpdate Fault = "no-simple-update"
	// NoFirmwarePush: firmware can only be fetched.
	NoFirmwarePush Fault = "no-firmware-push"
)

// Answers.
const (
	// DeepJSON: every answer of a GET nests 100,000 arrays.
	DeepJSON Fault = "deep-json"
	// EndlessBody: the answer of a GET never ends.
	EndlessBody Fault = "endless-body"
	// NotJSON: the answer of a GET is a web page, with 200.
	NotJSON Fault = "not-json"
	// CutJSON: the answer of a GET stops half way.
	CutJSON Fault = "cut-json"
	// OddTypes: numbers where the standard has strings, strings such as "N/A"
	// where it has numbers, null for objects; links, power state, boot override
	// and actions are right.
	OddTypes Fault = "odd-types"
	// TerminalEscapes: serial number, model, manufacturer and log messages hold
	// escape sequences.
	TerminalEscapes Fault = "terminal-escapes"
	// SuccessAsError (HPE): a change is answered 200 with an error object that
	// says Success.
	SuccessAsError Fault = "success-as-error"
	// AnswersLate: a change is answered after LateBy, 40 s unless set, once done.
	AnswersLate Fault = "answers-late"
	// DropsBefore: the connection of a change ends before anything is done.
	DropsBefore Fault = "drops-before"
	// DropsAfter: the connection of a change ends once it is done.
	DropsAfter Fault = "drops-after"
	// ResetsAfter: the BMC restarts after a change was done: no answer, all
	// sessions gone, and the next three requests get none either.
	ResetsAfter Fault = "resets-after"
	// FailsBefore: a change is 500, and nothing is done.
	FailsBefore Fault = "fails-before"
	// FailsAfter: a change is 500, although it is done.
	FailsAfter Fault = "fails-after"
	// Unavailable: every request is 503 with Retry-After: 1. Use it with Times.
	Unavailable Fault = "unavailable"
)

// TLS.
const (
	// OldTLS: TLS 1.0 and nothing newer, with an RSA certificate.
	OldTLS Fault = "old-tls"
	// RSAKeyExchange: TLS 1.2 with RSA key exchange and no other.
	RSAKeyExchange Fault = "rsa-key-exchange"
)

// Faults are all that there are.
func Faults() []Fault {
	return []Fault{
		BootRevertsToOnce, BootContinuousBecomesOnce, BootContinuousRefused, BootModeLost, BootModeRefused, BootWhole,
		BootSettings, BootIgnored, BootShownLate, BusyInPOST,
		EtagNeeded, EtagStrong, EtagWeak, EtagDoubledQuotes, EtagStarOnly, EtagRefused, EtagOnActions, EtagInBodyOnly, EtagRaces,
		BiosOnlyInSettings, BiosShownEarly, BiosNoSettings, BiosWantsApplyTime, BiosRefusesApplyTime, BiosDropsValues,
		TaskCritical, TaskException, TaskVanishes, TaskNeverEnds, TaskInLocation, TaskMonitorOnly, TaskUnnamed,
		MediaPatchOnly, MediaWantsCredentials, MediaWantsTransfer, MediaImageOnly, MediaEjectLeavesImage, MediaEjectEmptyFails,
		MediaOccupiedFails, MediaCannotVerify, MediaIgnored, MediaShownLate, MediaUnderSystem,
		ManagerAmongSystems, ManagerAsSystem, SeveralSystems, SlashNeeded, SlashInLinks, SlashRefused, SlashRedirects, MembersPaged, MembersEndless,
		LogUnderManager, Bare,
		ForeignRedirect, ForeignLinks, ForeignLocation, AbsoluteLinks, OutsideLinks,
		SessionsFull, NoSessions, NoBasic, SessionsExpire, SessionsDead, SessionUnnamed, PasswordChangeRequired,
		PasswordLimit16, PasswordLimit20, PasswordTruncated, PasswordIgnored, PasswordEndsSessions, AccountSlots,
		SoftIgnored, ActionInfoOnly, ResetTypesUnsaid, NoPowerCycle, NoNMI, GracefulOnly, ForcedOnly,
		PowerShownLate, PowerIgnored, PowerSameRefused,
		VolumesAtBoot, VolumesOldTypes, VolumesReadOnly, VolumesRenumbered, FirmwareUnchanged, FirmwareAtBoot, NoSimpleUpdate, NoFirmwarePush,
		DeepJSON, EndlessBody, NotJSON, CutJSON, OddTypes, TerminalEscapes, SuccessAsError, AnswersLate,
		DropsBefore, DropsAfter, ResetsAfter, FailsBefore, FailsAfter, Unavailable,
		OldTLS, RSAKeyExchange,
	}
}

// Times is the fault so many times; after that the BMC does right. The faults
// whose lines say what happens to a request or an action take it.
func (f Fault) Times(n int) Fault { return f + Fault("*"+strconv.Itoa(n)) }

// split is the fault and how often it still strikes, -1 for always.
func (f Fault) split() (Fault, int) {
	name, times, limited := strings.Cut(string(f), "*")
	if !limited {
		return f, -1
	}
	n, err := strconv.Atoi(times)
	if err != nil {
		n = 0
	}
	return Fault(name), n
}

// faultSet holds how often each fault still strikes; its owner locks.
type faultSet map[Fault]int

func newFaultSet(faults []Fault) faultSet {
	set := faultSet{}
	for _, f := range faults {
		name, n := f.split()
		if !slices.Contains(Faults(), name) {
			panic("bmctest: no such fault: " + string(name))
		}
		set[name] = n
	}
	return set
}

// on says whether f is there, and counts nothing.
func (s faultSet) on(f Fault) bool { return s[f] != 0 }

// strike is on, and one time of f is gone.
func (s faultSet) strike(f Fault) bool {
	n := s[f]
	if n > 0 {
		s[f] = n - 1
	}
	return n != 0
}
