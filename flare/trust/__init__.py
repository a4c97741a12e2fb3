"""Who may do what: signed records, controller sets, grants, join codes, publishers. No I/O, no clock."""
