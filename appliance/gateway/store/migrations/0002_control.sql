-- What people manage: API tokens, sites, pools, machines and workflows.

CREATE TABLE api_tokens (
  hash        BLOB PRIMARY KEY,           -- SHA-256 of the token; the token itself is nowhere
  name        TEXT NOT NULL,
  tenant_id   TEXT NOT NULL,              -- '*' stands for every tenant
  permissions TEXT NOT NULL,              -- JSON array of names; '*' stands for all
  created_ms  INTEGER NOT NULL,
  expires_ms  INTEGER NOT NULL,           -- 0: never
  UNIQUE (tenant_id, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE sites (
  id             TEXT PRIMARY KEY,
  tenant_id      TEXT NOT NULL,
  name           TEXT NOT NULL,
  created_ms     INTEGER NOT NULL,
  assign_version INTEGER NOT NULL DEFAULT 0,  -- of the latest pxe.assign snapshot
  UNIQUE (tenant_id, name)
) STRICT;

CREATE TABLE pools (
  id         TEXT PRIMARY KEY,
  tenant_id  TEXT NOT NULL,
  name       TEXT NOT NULL,
  site_id    TEXT NOT NULL REFERENCES sites (id),
  created_ms INTEGER NOT NULL,
  UNIQUE (tenant_id, name)
) STRICT;

CREATE TABLE machines (
  id              TEXT PRIMARY KEY,
  tenant_id       TEXT NOT NULL,
  name            TEXT NOT NULL,
  pool_id         TEXT NOT NULL REFERENCES pools (id),
  site_id         TEXT NOT NULL REFERENCES sites (id),
  driver          TEXT NOT NULL,
  address         TEXT NOT NULL,
  credentials_ref TEXT NOT NULL,
  tls_spki_sha256 TEXT NOT NULL,
  driver_options  TEXT NOT NULL,
  product_uuid    TEXT NOT NULL,
  state           TEXT NOT NULL,
  hardware_json   TEXT NOT NULL DEFAULT '',
  created_ms      INTEGER NOT NULL,
  -- The machine's part of the site's pxe.assign snapshot.
  action          TEXT NOT NULL DEFAULT 'local-disk',
  purpose         TEXT NOT NULL DEFAULT '',
  window_id       TEXT NOT NULL DEFAULT '',
  window_until_ms INTEGER NOT NULL DEFAULT 0,
  artifacts       TEXT NOT NULL DEFAULT '[]', -- JSON array of hex SHA-256
  UNIQUE (tenant_id, name)
) STRICT;

CREATE INDEX machines_by_site ON machines (site_id);

CREATE TABLE machine_macs (
  site_id    TEXT NOT NULL REFERENCES sites (id),
  mac        TEXT NOT NULL,
  machine_id TEXT NOT NULL REFERENCES machines (id),
  PRIMARY KEY (site_id, mac)
) STRICT, WITHOUT ROWID;

CREATE INDEX machine_macs_by_machine ON machine_macs (machine_id);

CREATE TABLE workflows (
  id            TEXT PRIMARY KEY,
  tenant_id     TEXT NOT NULL,
  name          TEXT NOT NULL,
  machine_id    TEXT NOT NULL REFERENCES machines (id),
  state         TEXT NOT NULL,            -- running, done, failed
  params        BLOB NOT NULL,            -- JSON of the workflow's own shape
  error_code    TEXT NOT NULL DEFAULT '',
  error_message TEXT NOT NULL DEFAULT '',
  created_ms    INTEGER NOT NULL,
  ended_ms      INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX workflows_by_tenant ON workflows (tenant_id, created_ms);
-- A machine is the subject of one workflow at a time.
CREATE UNIQUE INDEX workflows_running ON workflows (machine_id) WHERE state = 'running';

CREATE TABLE workflow_steps (
  workflow_id TEXT NOT NULL REFERENCES workflows (id),
  seq         INTEGER NOT NULL,
  id          TEXT NOT NULL,
  name        TEXT NOT NULL,
  state       TEXT NOT NULL,              -- waiting, running, done, failed
  attempt     INTEGER NOT NULL DEFAULT 0,
  started_ms  INTEGER NOT NULL DEFAULT 0,
  ended_ms    INTEGER NOT NULL DEFAULT 0,
  data        BLOB NOT NULL DEFAULT x'',  -- what a restart needs to take the step up again
  PRIMARY KEY (workflow_id, seq)
) STRICT, WITHOUT ROWID;
