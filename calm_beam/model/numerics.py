"""How products are made and masked, whatever the architecture."""

import jax
import numpy as np

# Float32 matrix products stay float32 on accelerators too: a calibrated threshold is only worth something
# if serving computes the same confidences.
PRECISION = jax.lax.Precision.HIGHEST

# Added to the logits of masked positions: exp() of it is exactly 0 next to any real logit.
MASKED = np.float32(-1e10)
