"""Blocks in packs on disk, codecs, manifests and the journal: every byte format of a store.

The only room that knows them. docs/format.md is their specification.
"""
