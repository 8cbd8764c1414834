-- The boot program that a machine's UEFI firmware gets from the network.

ALTER TABLE machines ADD COLUMN loader TEXT NOT NULL DEFAULT ''; -- snponly, ipxe or shim; empty: the usual one
