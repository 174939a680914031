"""Any module taken apart into stem, blocks and head: hooks, side inputs, sites."""
