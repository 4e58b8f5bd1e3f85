//! Which cache slot a promotion takes.

/// What a cache slot holds, as far as a promotion cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Occupancy {
    /// No adapter.
    Empty,
    /// An adapter that requests can acquire.
    Filled,
    /// A transaction writes the slot, or its adapter is unloaded once the last request has ended.
    Reserved,
}

/// A cache slot as victim selection sees it. Slots filled at startup and the active one are no cache slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotView {
    /// The slot.
    pub slot: u32,
    /// What it holds.
    pub occupancy: Occupancy,
    /// References that requests hold.
    pub refs: u32,
    /// Stamp of the last acquire, touch or commit; larger is later.
    pub last_used: u64,
}

/// Why no slot can be promoted into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VictimError {
    /// Every cache slot is in use.
    #[error("all {slots} cache slots are in use: retry when a request has ended")]
    PoolFull {
        /// Cache slots.
        slots: usize,
    },
    /// Every slot is active or was filled at startup.
    #[error("the pool has no cache slots: raise max_loras above the number of startup adapters")]
    NoCacheSlots,
}

/// The slot that a promotion takes: the first empty one, else the least recently used one without references (the
/// lowest number of equals).
///
/// # Errors
/// [`VictimError::NoCacheSlots`] without any view, [`VictimError::PoolFull`] where every slot is in use.
pub fn select_victim_slot(views: &[SlotView]) -> Result<u32, VictimError> {
    if views.is_empty() {
        return Err(VictimError::NoCacheSlots);
    }
    let empty = views
        .iter()
        .filter(|view| view.occupancy == Occupancy::Empty)
        .map(|view| view.slot)
        .min();
    let idle = views
        .iter()
        .filter(|view| view.occupancy == Occupancy::Filled && view.refs == 0)
        .min_by_key(|view| (view.last_used, view.slot))
        .map(|view| view.slot);
    empty
        .or(idle)
        .ok_or(VictimError::PoolFull { slots: views.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(slot: u32, occupancy: Occupancy, refs: u32, last_used: u64) -> SlotView {
        SlotView {
            slot,
            occupancy,
            refs,
            last_used,
        }
    }

    #[test]
    fn first_empty_slot_wins_over_any_idle_one() {
        let views = [
            view(1, Occupancy::Filled, 0, 1),
            view(2, Occupancy::Empty, 0, 9),
            view(3, Occupancy::Empty, 0, 0),
        ];
        assert_eq!(select_victim_slot(&views), Ok(2));
    }

    #[test]
    fn least_recently_used_idle_slot_is_taken_and_ties_go_to_the_lowest() {
        let views = [
            view(1, Occupancy::Filled, 1, 0),
            view(2, Occupancy::Filled, 0, 5),
            view(3, Occupancy::Filled, 0, 5),
            view(4, Occupancy::Reserved, 0, 0),
        ];
        assert_eq!(select_victim_slot(&views), Ok(2));
    }

    #[test]
    fn busy_and_reserved_slots_are_never_taken() {
        let views = [
            view(1, Occupancy::Filled, 1, 0),
            view(2, Occupancy::Reserved, 0, 0),
        ];
        assert_eq!(
            select_victim_slot(&views),
            Err(VictimError::PoolFull { slots: 2 })
        );
        assert_eq!(select_victim_slot(&[]), Err(VictimError::NoCacheSlots));
    }
}
