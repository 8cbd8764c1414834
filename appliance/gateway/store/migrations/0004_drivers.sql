-- Which drivers serve a machine, and what agents advertise.

ALTER TABLE pools ADD COLUMN hardware_profile TEXT NOT NULL DEFAULT '';

ALTER TABLE machines ADD COLUMN hardware_profile TEXT NOT NULL DEFAULT '';
ALTER TABLE machines ADD COLUMN drivers TEXT NOT NULL DEFAULT '{}';  -- JSON: kind to {driver, config}

-- A machine that was enrolled before has what its BMC binds.
UPDATE machines SET drivers = json_object(
  'management', json_object('driver', driver, 'config', json_object('address', address, 'credentials', credentials_ref)),
  'power', json_object('driver', driver, 'config', json_object('address', address, 'credentials', credentials_ref)),
  'virtual-media', json_object('driver', driver, 'config', json_object('address', address, 'credentials', credentials_ref)));

CREATE TABLE agent_labels (               -- of the last Hello
  agent_id  TEXT NOT NULL REFERENCES agents (id),
  key       TEXT NOT NULL,
  value     TEXT NOT NULL,
  PRIMARY KEY (agent_id, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX agent_labels_key ON agent_labels (key, value);
