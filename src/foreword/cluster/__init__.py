"""Several replicas of a model behind one address, on one machine: `foreword serve --replicas N`."""
