"""Generated code for the operator API `quire.admin.v1`; `protos/quire/admin/v1` documents it."""
