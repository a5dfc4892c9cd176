"""What a GPU, a link and a cluster can do: ``GpuProfile.seconds(operation)``, ``Link.seconds(collective)``, ``ClusterSpec``.

Forms (constants and held-out errors: docs/hardware.md):

* matrix product: ``t = t0 + max(F/(eff P) (1+m0/m)(1+n0/n)(1+k0/k)(1+F/F0)^g, bytes/(memory rate))``
* attention: ``t = t0 + F/(eff P) (1+s0/s)(1+w0 SM/tiles)``
* collective: ``t = alpha + S/B + c sqrt(S)``, S the bytes a rank puts on the wire
"""
