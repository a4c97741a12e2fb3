"""The data plane: forked workers that move payload bytes and decide nothing."""
