"""calm-beam: calibrated early exits for T5 decoders.

Import from the module that holds the idea, for example `calm_beam.manifest` or `calm_beam.risk.pvalues`; this
package imports nothing by itself, so that a serving process can read a manifest without JAX or Beam.
"""

__version__ = "0.1.0"
