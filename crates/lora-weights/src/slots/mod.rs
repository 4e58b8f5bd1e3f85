//! Adapters in slots.

mod victim;

pub use victim::{Occupancy, SlotView, VictimError, select_victim_slot};
