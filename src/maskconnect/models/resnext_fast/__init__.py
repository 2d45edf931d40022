"""Fast paths of ResNeXt: a whole layer of branches in one call, with the gradients of its masks."""
