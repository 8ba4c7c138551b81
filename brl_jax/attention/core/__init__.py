"""What the families of attention share: argument checks, absent tokens, softmax over blocks, biases, dispatch."""
