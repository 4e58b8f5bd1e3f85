//! The identity of an adapter in an engine's prefix cache.

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// Identity of a request that no adapter serves.
pub const BASE_ADAPTER_ID: u64 = 0;

/// The prefix-cache key of an adapter: FNV-1a 64 over the bytes of `name`, then over the little-endian bytes of
/// `generation` unless it is 0. Cached keys and values of one identity were computed with the same weights, in whatever
/// slot they lay. [`BASE_ADAPTER_ID`] means the base model, so that a hash of 0 becomes 1.
///
/// ```
/// use lora_weights::adapter_id_hash;
/// assert_eq!(adapter_id_hash("a", 0), 0xaf63_dc4c_8601_ec8c);
/// assert_ne!(adapter_id_hash("a", 0), adapter_id_hash("a", 1));
/// ```
pub fn adapter_id_hash(name: &str, generation: u64) -> u64 {
    let mut hash = fnv1a(FNV_OFFSET, name.as_bytes());
    if generation != 0 {
        hash = fnv1a(hash, &generation.to_le_bytes());
    }
    match hash {
        BASE_ADAPTER_ID => 1,
        other => other,
    }
}

fn fnv1a(seed: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(seed, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_fnv_1a_64() {
        // Vectors of the FNV authors' own test suite.
        assert_eq!(adapter_id_hash("", 0), 0xcbf2_9ce4_8422_2325);
        assert_eq!(adapter_id_hash("foobar", 0), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn generation_continues_the_hash_of_the_name() {
        let spelled = fnv1a(fnv1a(FNV_OFFSET, b"x"), &[7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(adapter_id_hash("x", 7), spelled);
    }
}
