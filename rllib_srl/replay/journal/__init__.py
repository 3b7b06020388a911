"""The journal on disk: its format, transactions, snapshots and readers."""
