-- What sites do with machines that nobody enrolled, and what was seen of those.

ALTER TABLE sites ADD COLUMN unknown_inspect INTEGER NOT NULL DEFAULT 0;   -- 0: they are left alone
ALTER TABLE sites ADD COLUMN unknown_expected TEXT NOT NULL DEFAULT '[]';  -- JSON array of MACs and product UUIDs
ALTER TABLE sites ADD COLUMN unknown_window TEXT NOT NULL DEFAULT '';      -- the boot window of the moment
ALTER TABLE sites ADD COLUMN unknown_until_ms INTEGER NOT NULL DEFAULT 0;

-- Changes of the snapshot that the box is to have without a workflow: how many
-- there were, how many it has, and which life of which box that was.
ALTER TABLE sites ADD COLUMN assign_change INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sites ADD COLUMN assign_told INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sites ADD COLUMN assign_told_to TEXT NOT NULL DEFAULT '';

CREATE TABLE found (                      -- machines that asked to boot and are no machine's
  site_id      TEXT NOT NULL REFERENCES sites (id),
  mac          TEXT NOT NULL,
  product_uuid TEXT NOT NULL DEFAULT '',  -- as its firmware said it over DHCP
  interface    TEXT NOT NULL DEFAULT '',
  client       TEXT NOT NULL DEFAULT '',
  class        TEXT NOT NULL DEFAULT '',
  ip           TEXT NOT NULL DEFAULT '',
  first_ms     INTEGER NOT NULL,
  seen_ms      INTEGER NOT NULL,
  inspected_ms INTEGER NOT NULL DEFAULT 0,
  inspection   TEXT NOT NULL DEFAULT '',  -- JSON, as its ramdisk reported
  rejected_ms  INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (site_id, mac)
) STRICT, WITHOUT ROWID;
