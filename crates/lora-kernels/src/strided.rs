//! Which bytes a strided view covers, and whether two views share one.

/// Rows of bytes at a fixed distance from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strided {
    /// First byte.
    pub(crate) base: u64,
    /// Rows.
    pub(crate) rows: u64,
    /// Bytes a row; at most `stride` where there are several rows.
    pub(crate) width: u64,
    /// Bytes from one row to the next.
    pub(crate) stride: u64,
}

impl Strided {
    /// One contiguous run.
    pub(crate) fn contiguous(base: u64, bytes: u64) -> Self {
        Self {
            base,
            rows: 1,
            width: bytes,
            stride: bytes,
        }
    }

    /// Bytes from the first to one past the last; `None` where that leaves 64 bits.
    pub(crate) fn extent(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        (self.rows - 1)
            .checked_mul(self.stride)?
            .checked_add(self.width)
    }

    fn is_empty(&self) -> bool {
        self.rows == 0 || self.width == 0
    }

    /// Whether the two share a byte. Exact where both have the same stride or one is a single row no wider than the other's stride; else
    /// views whose extents meet count as overlapping.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.is_empty() || other.is_empty() {
            return false;
        }
        let (a, b) = if self.base <= other.base {
            (self, other)
        } else {
            (other, self)
        };
        let distance = b.base - a.base;
        if a.extent().is_some_and(|extent| extent <= distance) {
            return false;
        }
        let stride = match (a.rows, b.rows) {
            (1, 1) => return true,
            (1, _) => b.stride,
            (_, 1) => a.stride,
            _ if a.stride == b.stride => a.stride,
            _ => return true,
        };
        if stride == 0 || a.width > stride || b.width > stride {
            return true;
        }
        // b's first row starts `column` bytes into a's row `row` (real or, past a's last, imagined); later rows of b stand alike against
        // later rows of a, so the first decides.
        let (row, column) = (distance / stride, distance % stride);
        let meets_row = row < a.rows && column < a.width;
        let wraps_into_next = row + 1 < a.rows && column + b.width > stride;
        meets_row || wraps_into_next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn bytes(view: &Strided) -> HashSet<u64> {
        (0..view.rows)
            .flat_map(|row| (0..view.width).map(move |i| view.base + row * view.stride + i))
            .collect()
    }

    fn view() -> impl Strategy<Value = Strided> {
        (0_u64..60, 0_u64..5, 1_u64..9).prop_flat_map(|(base, rows, stride)| {
            (0..=stride).prop_map(move |width| Strided {
                base,
                rows,
                width,
                stride,
            })
        })
    }

    proptest! {
        #[test]
        fn views_of_one_stride_are_compared_exactly(a in view(), b in view()) {
            let b = Strided { stride: a.stride, width: b.width.min(a.stride), ..b };
            prop_assert_eq!(a.overlaps(&b), !bytes(&a).is_disjoint(&bytes(&b)));
            prop_assert_eq!(a.overlaps(&b), b.overlaps(&a));
        }

        #[test]
        fn a_real_overlap_is_never_missed(a in view(), b in view()) {
            if !bytes(&a).is_disjoint(&bytes(&b)) {
                prop_assert!(a.overlaps(&b));
            }
        }

        #[test]
        fn a_single_row_between_strided_ones_is_free(a in view(), base in 0_u64..60, width in 1_u64..9) {
            let row = Strided::contiguous(base, width.min(a.stride));
            prop_assert_eq!(a.overlaps(&row), !bytes(&a).is_disjoint(&bytes(&row)));
        }
    }

    #[test]
    fn extents_past_64_bits_are_seen() {
        let huge = Strided {
            base: 0,
            rows: u64::MAX,
            width: 2,
            stride: 4,
        };
        assert_eq!(huge.extent(), None);
        assert!(huge.overlaps(&Strided::contiguous(1 << 40, 2)));
    }
}
