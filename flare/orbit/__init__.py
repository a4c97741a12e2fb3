"""The controller: pairs nodes, places groups, moves cores, starts and stops ranks."""
