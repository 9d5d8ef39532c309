"""gemv_p on several devices: what part of each array a device holds, and how the parts make the result.

The weight never moves. However its codes are sharded, over N, over K or over a stack, the other operands are brought
to where its parts lie: x its pieces of K, scale, zero, offset and bias their rows and groups. Parts of K or of a stack
give partial sums, which one all-reduce adds up in float32. In the transposed product N and K change places.

- Auto axes (auto.py): only the compiler knows the shardings. gemv_p is lowered to a custom_partitioning, which it asks.
- Explicit axes (explicit.py): the types tell while tracing, and gemv_p is bound inside a shard_map.
- Manual axes (a user's shard_map): each device has its part already; gemv_p is what it is on one device.

plan.py says how to cut, and what one device then does. Nothing here knows gemv_p: the product comes as an argument.
"""
