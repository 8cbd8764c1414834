-- The line home: who may call, what was sent, what came back.

CREATE TABLE tokens (
  hash        BLOB PRIMARY KEY,             -- SHA-256 of the token, which is kept nowhere
  role        INTEGER NOT NULL,
  site_id     TEXT NOT NULL,
  machine_id  TEXT NOT NULL,
  created_ms  INTEGER NOT NULL,
  expires_ms  INTEGER NOT NULL,
  csr_hash    BLOB,                         -- of the first CSR that came with it
  agent_id    TEXT,
  used_ms     INTEGER
) STRICT;

CREATE TABLE windows (
  id          TEXT PRIMARY KEY,
  site_id     TEXT NOT NULL,
  machine_id  TEXT NOT NULL,
  purpose     TEXT NOT NULL,
  opened_ms   INTEGER NOT NULL,
  until_ms    INTEGER NOT NULL
) STRICT;

CREATE TABLE vouchers (                     -- used ones
  window_id   TEXT NOT NULL,
  boot_nonce  BLOB NOT NULL,
  csr_hash    BLOB NOT NULL,
  agent_id    TEXT NOT NULL,
  used_ms     INTEGER NOT NULL,
  PRIMARY KEY (window_id, boot_nonce)
) STRICT;

CREATE TABLE agents (
  id              TEXT PRIMARY KEY,
  role            INTEGER NOT NULL,
  site_id         TEXT NOT NULL,
  machine_id      TEXT NOT NULL,
  window_id       TEXT NOT NULL,
  state           TEXT NOT NULL,            -- active, superseded, revoked, cloned
  product_uuid    TEXT NOT NULL,
  macs            TEXT NOT NULL,            -- JSON
  enrolled_ms     INTEGER NOT NULL,
  bundle_version  INTEGER NOT NULL,         -- of the trust bundle that it enrolled with
  -- from the last Hello
  version         TEXT NOT NULL,
  boot_id         TEXT NOT NULL DEFAULT '',
  journal_epoch   TEXT NOT NULL DEFAULT '',
  drivers         BLOB,                     -- JSON
  capabilities    TEXT NOT NULL DEFAULT '[]',
  clock_source    TEXT NOT NULL DEFAULT '',
  session_epoch   INTEGER NOT NULL DEFAULT 0,
  last_seen_ms    INTEGER NOT NULL DEFAULT 0,
  event_epoch     TEXT NOT NULL DEFAULT '',
  event_acked     INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX agents_site ON agents (site_id, role);
CREATE INDEX agents_machine ON agents (machine_id, role);

CREATE TABLE agent_boots (                  -- every boot_id heard, to notice one that comes back
  agent_id    TEXT NOT NULL,
  boot_id     TEXT NOT NULL,
  first_ms    INTEGER NOT NULL,
  PRIMARY KEY (agent_id, boot_id)
) STRICT;

CREATE TABLE certificates (
  fingerprint   BLOB PRIMARY KEY,           -- SHA-256 of the DER
  agent_id      TEXT NOT NULL,
  csr_hash      BLOB NOT NULL,
  der           BLOB NOT NULL,
  not_after_ms  INTEGER NOT NULL,
  renew_after_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX certificates_agent ON certificates (agent_id);

CREATE TABLE commands (
  seq           INTEGER PRIMARY KEY AUTOINCREMENT,
  id            TEXT NOT NULL UNIQUE,
  spec_hash     BLOB NOT NULL,              -- what the caller asked for, to refuse one id with two meanings
  agent_id      TEXT NOT NULL,
  target_node_id TEXT NOT NULL,
  kind          TEXT NOT NULL,
  lane          TEXT NOT NULL,
  workflow_id   TEXT NOT NULL,
  step_id       TEXT NOT NULL,
  attempt       INTEGER NOT NULL,
  secret_refs   TEXT NOT NULL,              -- JSON
  incarnation   TEXT NOT NULL,
  issued_ms     INTEGER NOT NULL,
  not_after_ms  INTEGER NOT NULL,
  payload       BLOB NOT NULL,
  key_id        TEXT NOT NULL,
  signature     BLOB NOT NULL,
  state         TEXT NOT NULL,              -- queued, sent, received, done
  cancel        INTEGER NOT NULL DEFAULT 0,
  result        BLOB,
  error_code    TEXT NOT NULL DEFAULT '',
  error_message TEXT NOT NULL DEFAULT '',
  error_retryable INTEGER NOT NULL DEFAULT 0,
  ended_ms      INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX commands_open ON commands (agent_id, seq) WHERE state <> 'done';
CREATE INDEX commands_deadline ON commands (not_after_ms) WHERE state <> 'done';

CREATE TABLE events (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  received_ms INTEGER NOT NULL,
  at_ms       INTEGER NOT NULL,
  site_id     TEXT NOT NULL,
  machine_id  TEXT NOT NULL,
  agent_id    TEXT NOT NULL,                -- empty: the gateway itself
  epoch       TEXT,                         -- null: made by the gateway
  seq         INTEGER,
  name        TEXT NOT NULL,
  class       TEXT NOT NULL,
  key         TEXT NOT NULL,
  body_json   TEXT NOT NULL,
  UNIQUE (agent_id, epoch, seq)
) STRICT;
CREATE INDEX events_site ON events (site_id, id);
CREATE INDEX events_name ON events (name, key, id);

CREATE TABLE secrets (
  ref         TEXT PRIMARY KEY,
  sealed      BLOB NOT NULL,                -- nonce and AES-256-GCM box, the reference as associated data
  updated_ms  INTEGER NOT NULL
) STRICT;

CREATE TABLE artifacts (
  name            TEXT NOT NULL,
  arch            TEXT NOT NULL,
  format          TEXT NOT NULL,
  sha256          TEXT NOT NULL,
  size            INTEGER NOT NULL,
  unpacked_sha256 TEXT NOT NULL,
  unpacked_size   INTEGER NOT NULL,
  chunk_size      INTEGER NOT NULL,
  chunks_sha256   TEXT NOT NULL,
  imported_ms     INTEGER NOT NULL,
  PRIMARY KEY (name, arch)
) STRICT;
CREATE INDEX artifacts_sha256 ON artifacts (sha256);
