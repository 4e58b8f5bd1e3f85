//! The command line in process, over the recorded adapters. One executable, so that it is linked and carried once.

mod audit;
mod docs;
mod overlays;
mod plan;
mod verify;
