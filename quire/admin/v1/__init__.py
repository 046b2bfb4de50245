"""Generated code of the operator API `quire.admin.v1`; `protos/quire/admin/v1` documents it."""
