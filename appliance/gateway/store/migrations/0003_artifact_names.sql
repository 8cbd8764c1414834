-- Who may give an artifact's name a new meaning. Everybody may use it.

CREATE TABLE artifact_names (
  name      TEXT PRIMARY KEY,
  tenant_id TEXT NOT NULL
) STRICT, WITHOUT ROWID;
