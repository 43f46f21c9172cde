def markdown(r): return "x"
