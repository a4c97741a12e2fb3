"""The fast network between nodes: which endpoints a node has, and which way core bytes take."""
