//! The expert region's allocator: which units are free, and whose the others are.

use std::collections::BTreeMap;
use std::ops::Range;

/// Units that belong to one slot, as ascending runs. Not necessarily adjacent to each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct UnitRuns(Vec<Range<u64>>);

impl UnitRuns {
    /// Units in all runs.
    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|run| run.end - run.start).sum()
    }

    /// The runs, ascending.
    pub(crate) fn runs(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Every unit, ascending.
    pub(crate) fn units(&self) -> impl Iterator<Item = u64> {
        self.0.iter().cloned().flatten()
    }
}

/// A free list of equal units. An allocation takes the lowest free ones wherever they lie, so that it succeeds exactly
/// when enough are free.
#[derive(Debug)]
pub(crate) struct UnitAllocator {
    total: u64,
    free: u64,
    /// Start to end of every free run; adjacent runs are merged.
    runs: BTreeMap<u64, u64>,
}

impl UnitAllocator {
    pub(crate) fn new(total: u64) -> Self {
        Self {
            total,
            free: total,
            runs: (total > 0).then_some((0, total)).into_iter().collect(),
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Takes `count` units; `None`, having taken nothing, where fewer are free.
    pub(crate) fn allocate(&mut self, count: u64) -> Option<UnitRuns> {
        if count > self.free {
            return None;
        }
        self.free -= count;
        let mut taken = Vec::new();
        let mut missing = count;
        while missing > 0 {
            let (start, end) = self.runs.pop_first()?;
            let cut = end.min(start + missing);
            if cut < end {
                self.runs.insert(cut, end);
            }
            missing -= cut - start;
            taken.push(start..cut);
        }
        Some(UnitRuns(taken))
    }

    /// Gives units back. They must have come from [`allocate`](Self::allocate), once.
    pub(crate) fn release(&mut self, units: UnitRuns) {
        for Range { mut start, mut end } in units.0 {
            self.free += end - start;
            if let Some((&before, &before_end)) = self.runs.range(..start).next_back() {
                debug_assert!(before_end <= start, "unit freed twice");
                if before_end == start {
                    start = before;
                }
            }
            if let Some(after_end) = self.runs.remove(&end) {
                end = after_end;
            }
            self.runs.insert(start, end);
        }
        debug_assert!(self.free <= self.total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn allocation_spans_holes_and_neighbours_merge_when_freed() {
        let mut units = UnitAllocator::new(10);
        let a = units.allocate(3).unwrap();
        let b = units.allocate(3).unwrap();
        let c = units.allocate(3).unwrap();
        units.release(b);
        assert_eq!(units.free(), 4);
        let d = units.allocate(4).unwrap();
        assert_eq!(d.runs(), [3..6, 9..10]);
        assert_eq!(units.allocate(1), None);
        assert_eq!(units.free(), 0);
        for runs in [c, a, d] {
            units.release(runs);
        }
        assert_eq!(units.runs.into_iter().collect::<Vec<_>>(), [(0, 10)]);
    }

    #[test]
    fn a_refused_allocation_takes_nothing() {
        let mut units = UnitAllocator::new(2);
        assert_eq!(units.allocate(3), None);
        assert_eq!(units.free(), 2);
        assert_eq!(units.allocate(0), Some(UnitRuns::default()));
    }

    proptest! {
        #[test]
        fn units_are_handed_out_once_and_fit_exactly_when_enough_are_free(
            total in 0u64..64,
            steps in prop::collection::vec((any::<bool>(), 0u64..20, any::<prop::sample::Index>()), 1..100),
        ) {
            let mut allocator = UnitAllocator::new(total);
            let mut held: Vec<UnitRuns> = Vec::new();
            for (release, count, pick) in steps {
                if release && !held.is_empty() {
                    let at = pick.index(held.len());
                    allocator.release(held.swap_remove(at));
                } else {
                    let free = allocator.free();
                    let taken = allocator.allocate(count);
                    prop_assert_eq!(taken.is_some(), count <= free);
                    held.extend(taken);
                }
                let mut owned: Vec<u64> = held.iter().flat_map(UnitRuns::units).collect();
                owned.sort_unstable();
                let count = owned.len() as u64;
                owned.dedup();
                prop_assert_eq!(owned.len() as u64, count, "a unit has two owners");
                prop_assert!(owned.iter().all(|unit| *unit < total));
                prop_assert_eq!(allocator.free(), total - count);
            }
        }
    }
}
