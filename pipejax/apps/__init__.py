"""Programs over a generator: files of records, evaluations, bulk, exports, a server, and pictures."""
