-- What people approve of destructive work, who signed it, and what used it.

CREATE TABLE grants (
  id           TEXT PRIMARY KEY,
  tenant_id    TEXT NOT NULL,
  site_id      TEXT NOT NULL REFERENCES sites (id),
  payload      BLOB NOT NULL,             -- what approvers sign
  not_after_ms INTEGER NOT NULL,
  proposed_ms  INTEGER NOT NULL
) STRICT;
CREATE INDEX grants_by_tenant ON grants (tenant_id, proposed_ms);

CREATE TABLE grant_targets (              -- the tree's leaves, in its order
  grant_id TEXT NOT NULL REFERENCES grants (id),
  position INTEGER NOT NULL,
  target   TEXT NOT NULL,
  PRIMARY KEY (grant_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX grant_targets_by_target ON grant_targets (target, grant_id);

CREATE TABLE grant_signatures (
  grant_id  TEXT NOT NULL REFERENCES grants (id),
  key_id    TEXT NOT NULL,
  signature BLOB NOT NULL,
  signed_ms INTEGER NOT NULL,
  PRIMARY KEY (grant_id, key_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE grant_uses (                 -- by commands that cite it; the box has the word
  command_id TEXT NOT NULL,
  grant_id   TEXT NOT NULL REFERENCES grants (id),
  target     TEXT NOT NULL,
  PRIMARY KEY (command_id, grant_id, target)
) STRICT, WITHOUT ROWID;
CREATE INDEX grant_uses_by_target ON grant_uses (grant_id, target);
