"""One adapter an engine: how it is started, watched and stopped, from the rank's context alone."""
