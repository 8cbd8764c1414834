-- What machines are to run, and what they said of it.

CREATE TABLE instances (
  id          TEXT PRIMARY KEY,
  tenant_id   TEXT NOT NULL,
  machine_id  TEXT NOT NULL REFERENCES machines (id),
  name        TEXT NOT NULL,
  runtime     TEXT NOT NULL,              -- a driver's id
  spec_json   TEXT NOT NULL,
  generation  INTEGER NOT NULL,           -- rises with every change, the removal included
  removing    INTEGER NOT NULL,
  created_ms  INTEGER NOT NULL,
  -- What the node took: the generation, and which life of which agent it was.
  taken_generation  INTEGER NOT NULL DEFAULT 0,
  taken_by          TEXT NOT NULL DEFAULT '',
  attempt           INTEGER NOT NULL DEFAULT 0, -- commands sent for this generation that failed
  -- What was last heard of it.
  state       TEXT NOT NULL DEFAULT 'pending',
  message     TEXT NOT NULL DEFAULT '',
  observed_generation INTEGER NOT NULL DEFAULT 0,
  observed_ms INTEGER NOT NULL DEFAULT 0,
  UNIQUE (machine_id, name)
) STRICT;
CREATE INDEX instances_by_tenant ON instances (tenant_id, machine_id);
