"""The parts of `srl upgrade`: its order, its ledger on disk, one attempt."""
