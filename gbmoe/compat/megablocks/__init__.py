"""MegaBlocks: its ops on gbmoe's operators (gbmoe.compat.megablocks.ops). MegaBlocks itself need not be installed."""
