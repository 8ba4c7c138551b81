"""The figures and propositions of the papers, measured on trained runs or on small networks."""
