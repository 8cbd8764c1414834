-- What commands to BMCs leave to be done here when they end.

ALTER TABLE machines ADD COLUMN protected INTEGER NOT NULL DEFAULT 0; -- what is destructive always needs people's grants

CREATE TABLE rotations (                  -- new passwords that no log-in has proved yet
  credentials_ref TEXT PRIMARY KEY,       -- never two of one credential
  pending_ref     TEXT NOT NULL UNIQUE,   -- the secret with the new password
  tenant_id       TEXT NOT NULL,
  machine_id      TEXT NOT NULL REFERENCES machines (id),
  command_id      TEXT NOT NULL,          -- the latest attempt
  attempts        INTEGER NOT NULL,
  flying          INTEGER NOT NULL,       -- the outcome of command_id was not looked at yet
  unclear         INTEGER NOT NULL,       -- an attempt may have changed the BMC
  next_ms         INTEGER NOT NULL,       -- when it is tried again by itself; 0: never
  error_code      TEXT NOT NULL DEFAULT '',
  error_message   TEXT NOT NULL DEFAULT '',
  begun_ms        INTEGER NOT NULL
) STRICT;

CREATE TABLE rebinds (                    -- what a bmc.bind makes of a machine once it is done
  command_id      TEXT PRIMARY KEY,
  machine_id      TEXT NOT NULL REFERENCES machines (id),
  driver          TEXT NOT NULL,
  address         TEXT NOT NULL,
  credentials_ref TEXT NOT NULL,
  tls_spki_sha256 TEXT NOT NULL,
  driver_options  TEXT NOT NULL,
  protected       INTEGER NOT NULL,
  begun_ms        INTEGER NOT NULL
) STRICT;
