// Package layout holds the test that keeps the rooms of natsflow apart: which
// package may import which. There is nothing to import here.
package layout
