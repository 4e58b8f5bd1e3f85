//! The real lock.

pub(in crate::slots) use parking_lot::Mutex;
