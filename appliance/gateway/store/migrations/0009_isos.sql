-- The catalog of disc images, and what machines boot from the network beside the ramdisk.

ALTER TABLE machines ADD COLUMN boot TEXT NOT NULL DEFAULT ''; -- JSON: the disc image or kernel of the assignment, and how often it may boot

CREATE TABLE isos (
  tenant_id  TEXT NOT NULL,
  name       TEXT NOT NULL,
  sha256     TEXT NOT NULL,
  size       INTEGER NOT NULL,
  facts      TEXT NOT NULL,            -- JSON: label, class, how it boots, what is to be known of it
  added_ms   INTEGER NOT NULL,
  PRIMARY KEY (tenant_id, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX isos_by_digest ON isos (sha256);
